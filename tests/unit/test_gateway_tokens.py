"""Tokenizers and chat templates: the same ids and bytes as the reference, and nothing unsafe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from baton.engine.fake_model import write_fake_model
from baton.gateway.text import AnswerText
from baton.gateway.tokens import ModelFolderError, ModelText, TemplateError, load_model_text

pytest_plugins = ["support.engine_fixtures"]

USER = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, template: str) -> ModelText:
    write_fake_model(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = template
    path.write_text(json.dumps(config))
    return load_model_text(folder)


def test_ids_and_text_are_inverse(tmp_path: Path) -> None:
    """Every text comes back from its ids, special tokens as they are written."""
    write_fake_model(tmp_path)
    text = load_model_text(tmp_path)
    for sample in ("", "abc", "Grüße 你好 👩‍👩‍👧", "a<|im_end|>b", "\x00\x7f"):
        assert text.text_of(text.encode(sample, special=True)) == sample
    assert text.is_special(257)
    assert text.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5]['role'] + 'x' }}",
        "{{ 1 / 0 if false else messages | nosuchvalue }}",
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    """A template that reaches out, changes what it was given or raises is a clear error."""
    with pytest.raises((TemplateError, ModelFolderError)) as refused:
        with_template(tmp_path, template).render(USER)
    assert str(refused.value)


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    """strftime_now, tojson, loop controls, trimmed blocks, the names of special tokens."""
    template = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ {'ä': '<'} | tojson }}{{ eos_token }}{{ strftime_now('%Y') | length }}{{ mood }}"
        "\n{% endfor %}"
    )
    text = with_template(tmp_path, template)
    rendered = text.render([*USER, *USER], extra={"mood": "calm"})
    assert rendered == '{"ä": "<"}<|eos|>4calm\n'


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    """chat_template.jinja is where newer models keep it; without any, chatting is refused."""
    write_fake_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("X{{ messages[0].content }}")
    assert load_model_text(tmp_path).render(USER) == "Xhi"
    with pytest.raises(TemplateError, match="no chat template"):
        with_template(tmp_path / "other", "").render(USER)


@pytest.mark.parametrize("name", ["baton.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_broken_folder_is_named(tmp_path: Path, name: str) -> None:
    """A missing or broken file is an error that names it."""
    write_fake_model(tmp_path)
    (tmp_path / name).write_text("{ broken")
    with pytest.raises(ModelFolderError, match=name):
        load_model_text(tmp_path)
    with pytest.raises(ModelFolderError, match="no prepared model"):
        load_model_text(tmp_path / "nowhere")


def sentencepiece_like(folder: Path) -> ModelText:
    """A tokenizer of Llama's kind: blanks as U+2581, bytes as <0xNN>, first blank dropped."""
    write_fake_model(folder)
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "!", "▁"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_model_text(folder)


def test_byte_fallback_tokenizers(tmp_path: Path) -> None:
    """Bytes written as tokens are joined to characters; the blank before the text is dropped."""
    text = sentencepiece_like(tmp_path)
    smile = [1 + byte for byte in "😀".encode()]
    ids = [257, 258, 259, *smile]
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids)
    assert text.text_of(ids) == reference == "Hello world!😀"
    answer = AnswerText(text, strip_first_space=text.strip_first_space)
    pieces = [answer.feed([i]).text for i in ids]
    assert "".join([*pieces, answer.finish().text]) == reference
    assert "\ufffd" not in "".join(pieces)


def test_unknown_decoders_are_refused(tmp_path: Path) -> None:
    """A tokenizer whose bytes we cannot tell is refused at load, not answered wrongly."""
    write_fake_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFolderError, match="WordPiece"):
        load_model_text(tmp_path)


# --- the default model --------------------------------------------------------------------------

CHATS: list[list[dict[str, Any]]] = [
    USER,
    [{"role": "system", "content": "Be brief."}, *USER],
    [*USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Größe? 👩‍👧"}],
    [{"role": "user", "content": "  spaces \n\n and tabs\t"}],
]


@pytest.mark.model
def test_default_model_agrees_with_transformers(model_dir: Path) -> None:
    """Prompt ids of chats, and texts of any ids, are those of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = model_dir
    ours = load_model_text(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        rendered = ours.render(chat)
        assert rendered == expected
        assert (
            ours.encode(rendered, special=False)
            == theirs(expected, add_special_tokens=False).input_ids
        )
    for text in ("Hello world", " Grüße 你好 👩‍👩‍👧 🇩🇪", "def f(x):\n    return x + 1\n", "\t\r\n"):
        ids = ours.encode(text, special=False)
        assert ours.text_of(ids) == text == theirs.decode(ids, clean_up_tokenization_spaces=False)
        answer = AnswerText(ours)
        pieces = [answer.feed([i]).text for i in ids]
        assert "".join([*pieces, answer.finish().text]) == text

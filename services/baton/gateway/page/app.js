// The playground: one conversation in memory, streamed with fetch, nothing else.
const $ = (id) => document.getElementById(id);
const log = $("log"), form = $("form"), prompt = $("prompt"), send = $("send"), stop = $("stop");
const notice = $("notice"), settings = $("settings");

const messages = [];
let model = "";
let ready = false;
let running = null; // AbortController of the answer under way
let chat = 0; // grows with every new chat: an answer of an earlier one is not kept

// --- settings, kept in this browser -------------------------------------------------------------

const KEPT = ["system", "temperature", "max-tokens", "seed"];

function stored(store, name) {
  try { return store.getItem("baton." + name); } catch { return null; }
}
function keep(store, name, value) {
  try { store.setItem("baton." + name, value); } catch { /* private mode: forgotten at once */ }
}
for (const name of KEPT) {
  const value = stored(localStorage, name);
  if (value !== null) $(name).value = value;
  $(name).addEventListener("input", () => { keep(localStorage, name, $(name).value); show(); });
}
$("key").value = stored(sessionStorage, "key") ?? "";
$("key").addEventListener("change", () => { keep(sessionStorage, "key", $("key").value); check(); });
function show() { $("temperature-value").textContent = Number($("temperature").value).toFixed(1); }
show();

function toggleSettings(open) {
  settings.hidden = !open;
  $("settings-open").setAttribute("aria-expanded", String(open));
  // On a touch screen a focused field would raise the keyboard over the settings.
  if (open) $(matchMedia("(hover: hover)").matches ? "system" : "settings-close").focus({ preventScroll: true });
  else $("settings-open").focus();
}
$("settings-open").addEventListener("click", () => toggleSettings(settings.hidden));
$("settings-close").addEventListener("click", () => toggleSettings(false));

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

// --- the server's state -------------------------------------------------------------------------

function state(kind, text) {
  $("status").dataset.state = kind;
  $("status-text").textContent = text;
}

async function check() {
  try {
    const health = await fetch("health", { cache: "no-store" });
    ready = health.ok;
    if (health.ok) state("ok", "ready");
    else {
      const body = await health.json().catch(() => ({}));
      state("bad", (body.reason ?? "unavailable").replaceAll("_", " "));
    }
    if (!model) await loadModel();
  } catch {
    ready = false;
    state("bad", "server unreachable");
  }
  update();
}

async function loadModel() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.status === 401) { $("model").textContent = "an API key is needed: see Settings"; return; }
  if (!answer.ok) return;
  const [first] = (await answer.json()).data;
  if (!first) return;
  model = first.id;
  $("model").textContent = `${first.id} · context ${first.max_model_len.toLocaleString("en")}`;
}

function update() {
  send.hidden = running !== null;
  stop.hidden = running === null;
  send.disabled = !model || !prompt.value.trim();
}

// --- the conversation ---------------------------------------------------------------------------

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function addTurn(role, text) {
  $("welcome")?.setAttribute("hidden", "");
  const turn = element("article", "turn " + role);
  turn.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const bubble = element("div", "bubble", text);
  turn.append(bubble);
  log.append(turn);
  follow(true);
  return { turn, bubble };
}

function follow(force) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  if (force || near) log.scrollTop = log.scrollHeight;
}

function fact(list, value, unit) {
  const item = element("span", "");
  item.append(element("b", "", value), " " + unit);
  list.append(item);
}

function showFacts(turn, run, problem) {
  turn.querySelector(".facts")?.remove();
  const list = element("div", "facts");
  if (run.firstAt !== null) fact(list, (run.firstAt - run.startedAt).toFixed(0), "ms to first token");
  const tokens = run.usage?.completion_tokens ?? run.chunks;
  if (tokens > 1 && run.lastAt > run.firstAt) {
    fact(list, ((tokens - 1) / ((run.lastAt - run.firstAt) / 1000)).toFixed(1), "tokens/s");
  }
  if (tokens) fact(list, String(tokens), tokens === 1 ? "token" : "tokens");
  if (run.usage?.prompt_tokens_details?.cached_tokens) {
    fact(list, String(run.usage.prompt_tokens_details.cached_tokens), "cached");
  }
  if (run.finish === "length") list.append(element("span", "", "cut at the token limit"));
  if (problem) list.append(element("span", "bad", problem));
  if (list.childNodes.length) turn.append(list);
}

function tell(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

function body() {
  const system = $("system").value.trim();
  const seed = $("seed").value.trim();
  const most = Math.max(1, Math.floor(Number($("max-tokens").value)) || 512);
  return JSON.stringify({
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    max_tokens: most,
    ...(seed && Number.isSafeInteger(Number(seed)) ? { seed: Number(seed) } : {}),
    stream: true,
    stream_options: { include_usage: true },
  });
}

class Problem extends Error {}
const RESUME_S = 60; // how long the server keeps an answer whose connection broke

async function refusal(answer) {
  let text = "";
  try { text = (await answer.json()).error.message; } catch { /* no JSON: the status must do */ }
  const wait = answer.headers.get("retry-after");
  const again = wait ? ` Try again in ${wait} s.` : "";
  return new Problem(`${text || "The server answered " + answer.status}.${again}`.replace("..", "."));
}

// An answer over as many connections as it takes: one that breaks is resumed where it was, until the
// server has it no more or nobody answers for RESUME_S.
async function* answered(signal, kept) {
  let lastId = "", brokenAt = null;
  for (;;) {
    try {
      const answer = await (kept.token
        ? fetch(`v1/requests/${kept.token}/events`, { headers: { ...headers(), ...(lastId && { "Last-Event-ID": lastId }) }, signal })
        : fetch("v1/chat/completions", {
          method: "POST",
          headers: { "Content-Type": "application/json", "X-Baton-Resume": String(RESUME_S), ...headers() },
          body: body(),
          signal,
        }));
      if (answer.status === 204) { yield null; return; }
      if (!answer.ok && !(kept.token && answer.status === 503)) throw await refusal(answer);
      kept.token = answer.headers.get("x-baton-resume-token") ?? kept.token;
      for await (const { id, data } of answer.ok ? events(answer) : []) {
        const chunk = data === "[DONE]" ? null : JSON.parse(data);
        if (chunk?.error?.code === "draining") break; // another gateway goes on
        yield chunk;
        if (chunk === null) return;
        lastId = id || lastId;
        brokenAt = null;
      }
    } catch (error) {
      if (!kept.token || error.name === "AbortError" || error instanceof Problem) throw error;
    }
    brokenAt ??= performance.now();
    if (!kept.token || performance.now() - brokenAt > RESUME_S * 1000) return;
    await new Promise((resolve) => setTimeout(resolve, 300));
    signal.throwIfAborted();
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const value = (name) => lines.find((line) => line.startsWith(name))?.slice(name.length);
      const data = value("data: ");
      if (data !== undefined) yield { id: value("id: ") ?? "", data };
    }
  }
}

async function ask(text) {
  tell("");
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  const { turn, bubble } = addTurn("assistant waiting", "");
  const run = { startedAt: performance.now(), firstAt: null, lastAt: 0, chunks: 0, usage: null, finish: null };
  running = new AbortController();
  update();
  let content = "", complete = false, problem = "";
  const own = chat, kept = { token: "" };
  try {
    for await (const chunk of answered(running.signal, kept)) {
      if (chunk === null) { complete = true; break; }
      if (chunk.error) throw new Problem(chunk.error.message);
      run.usage = chunk.usage ?? run.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      run.finish = choice.finish_reason ?? run.finish;
      if (choice.delta.content) {
        run.lastAt = performance.now();
        if (run.firstAt === null) { run.firstAt = run.lastAt; turn.className = "turn assistant running"; }
        run.chunks += 1;
        content += choice.delta.content;
        bubble.textContent = content;
        follow(false);
      }
    }
    if (!complete) throw new Problem("The connection was cut before the answer was complete");
  } catch (error) {
    if (error.name === "AbortError") {
      problem = "stopped";
      // A closed connection alone would leave it running for whoever comes back.
      if (kept.token) fetch(`v1/requests/${kept.token}`, { method: "DELETE", headers: headers() }).catch(() => {});
    }
    else if (error instanceof Problem) problem = error.message;
    else problem = run.chunks ? "The connection was cut before the answer was complete" : "The server cannot be reached";
  }
  running = null;
  if (own !== chat) { update(); return; } // its turns and messages are gone already
  turn.className = "turn assistant";
  showFacts(turn, run, problem);
  if (content) messages.push({ role: "assistant", content });
  else {
    messages.pop();
    if (problem && problem !== "stopped") {
      tell(problem);
      turn.remove();
      if (!prompt.value) prompt.value = text;
      grow();
    }
  }
  follow(false);
  update();
  if (problem && problem !== "stopped") check();
  if (matchMedia("(hover: hover)").matches) prompt.focus();
}

// --- the composer -------------------------------------------------------------------------------

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = prompt.scrollHeight + "px";
  update();
}

prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !model) return;
  prompt.value = "";
  grow();
  ask(text);
});
stop.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (!settings.hidden) toggleSettings(false);
});
$("clear").addEventListener("click", () => {
  chat += 1;
  running?.abort();
  messages.length = 0;
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  $("welcome").removeAttribute("hidden");
  tell("");
  prompt.focus();
});
for (const sample of document.querySelectorAll(".sample")) {
  sample.addEventListener("click", () => { prompt.value = sample.textContent; grow(); form.requestSubmit(); });
}

check();
setInterval(() => { if (!document.hidden && (!ready || !running)) check(); }, 5000);

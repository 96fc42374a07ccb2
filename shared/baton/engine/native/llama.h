// The whole step of a Llama-like model: embedding, layers, head, over packed weights.
//
// Decides what is rounded where: the residual stream, norms, rotary positions, scores and sums are
// float32; what a matrix product reads, and K and V, are rounded to the model's dtype. (The modules
// of transformers round the residual stream and every intermediate too: in bfloat16 this step is the
// closer one to float32.) The last layer's queries are computed for sampled tokens alone.
#pragma once

#include <vector>

#include "attention.h"
#include "buffer.h"
#include "pool.h"

namespace baton {

struct LlamaShape {
  int layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, context, block_size;
  int rotary;  // dimensions of a head that carry the position
  float norm_eps, scale;
};

template <class T>
struct LlamaLayer {
  Weights<T> qkv;      // [q heads, k heads, v heads]
  Weights<T> out;
  Weights<T> gate_up;  // columns in turn: 16 of gate, 16 of up
  Weights<T> down;
  const float* attention_norm;
  const float* mlp_norm;
  const float* q_norm;  // [head_dim], or null
  const float* k_norm;
  int window;  // 0: all
  bool rotate;
};

class Llama {
 public:
  virtual ~Llama() = default;
  // One packed step up to the head: when it returns, nothing of it stores or reads K and V any more.
  // `keep`: places of the tokens whose logits are wanted, at most one a row and only a row's last, in
  // order of the rows. Returns whether the kept tokens' lines are finite.
  virtual bool step(const Row* rows, int count, const int32_t* ids, int tokens,
                    const int32_t* keep, int kept) = 0;
  // The kept tokens' logits, once after each step that kept some: float [kept][vocab].
  virtual void head(float* logits) = 0;
  // Around a step and what comes after it, see `Pool`.
  virtual void claim() = 0;
  virtual void begin(bool borrows) = 0;
  virtual double end() = 0;
  int kept = 0;  // tokens of the last step that wait for the head
  LlamaShape shape;
};

template <class T>
class LlamaOf final : public Llama {
 public:
  LlamaOf(const LlamaShape& given, int threads, Cores cores) : pool_(threads, std::move(cores)) {
    shape = given;
    layout_ = {given.layers, given.kv_heads, given.head_dim, given.block_size};
    for (int i = 0; i < pool_.most(); ++i) scratch_.emplace_back(given.head_dim);
  }

  const T* embedding = nullptr;       // [vocab][hidden]
  const float* rotary = nullptr;      // [context][2][rotary / 2]: cosines, sines
  const float* final_norm = nullptr;  // [hidden]
  Weights<T> output{};
  std::vector<LlamaLayer<T>> layers;

  bool step(const Row* rows, int count, const int32_t* ids, int tokens, const int32_t* keep,
            int wanted) override {
    kept = wanted;
    size_buffers(tokens);
    position_.resize(tokens);
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < rows[r].count; ++i) position_[rows[r].begin + i] = rows[r].start + i;
    embed(ids, tokens);
    std::vector<Row> live(rows, rows + count);
    int lines = tokens;
    for (int l = 0; l < shape.layers; ++l) {
      project(l, lines, live);
      if (l == shape.layers - 1) {
        live = last_tokens(live, keep, kept);
        lines = kept;
        if (kept == 0) return true;
      }
      attend(l, live, lines);
      feed_forward(l, lines);
    }
    const float* end = x_ + ptrdiff_t(kept) * shape.hidden;
    return std::all_of(static_cast<const float*>(x_), end, [](float x) { return std::isfinite(x); });
  }

  void head(float* logits) override {
    norm(final_norm, kept);
    spread(output, normed_, shape.hidden, kept, [&](int row, int rows, int group, float* block) {
      const int column = group * kGroup, left = std::min(kGroup, shape.vocab - column);
      for (int i = 0; i < rows; ++i)
        std::memcpy(logits + ptrdiff_t(row + i) * shape.vocab + column, block + i * kGroup,
                    left * sizeof(float));
    });
    kept = 0;
  }

  void claim() override { pool_.claim(); }
  void begin(bool borrows) override { pool_.begin(borrows); }
  double end() override { return pool_.end(); }

 private:
  int q_width() const { return shape.heads * shape.head_dim; }
  int kv_width() const { return shape.kv_heads * shape.head_dim; }
  int qkv_width() const { return q_width() + 2 * kv_width(); }

  void size_buffers(size_t tokens) {
    x_ = x_memory_.sized(tokens * shape.hidden);
    normed_ = normed_memory_.sized(tokens * shape.hidden);
    qkv_ = qkv_memory_.sized(tokens * (qkv_width() + kGroup));
    attended_ = attended_memory_.sized(tokens * q_width());
    gated_ = gated_memory_.sized(tokens * shape.intermediate);
  }

  // Multiply-adds after which a borrowed core can be had back: a millisecond or less where it counts.
  static constexpr long kSliceWork = 1 << 26;
  // Lines that are worth asking for a borrowed core.
  static constexpr int kLinesLent = 64;

  // Everybody takes some of a product's groups.
  template <class Done>
  void spread(const Weights<T>& w, const Act<T>* a, ptrdiff_t lda, int lines, const Done& done) {
    const Crew crew = pool_.gather();
    const long work = long(lines) * w.k * kGroup;
    Slices groups(w.groups(), crew, int(std::max(1L, kSliceWork / std::max(1L, work))));
    pool_.run(crew, [&](Seat& seat) {
      product<T>(w, a, lda, lines,
                 [&](int& first, int& last) { return groups.next(seat, first, last); }, done);
    });
  }

  template <class Work>
  void each_line(int lines, const Work& work) {
    const Crew crew = lines < kLinesLent ? pool_.own() : pool_.gather();
    if (lines < 2 * crew.threads) {  // less than waking somebody costs
      for (int i = 0; i < lines; ++i) work(i);
      return;
    }
    Slices some(lines, crew, lines);
    pool_.run(crew, [&](Seat& seat) {
      for (int i, last; some.next(seat, i, last);)
        for (; i < last; ++i) work(i);
    });
  }

  void embed(const int32_t* ids, int tokens) {
    each_line(tokens, [&](int i) {
      const T* from = embedding + ptrdiff_t(ids[i]) * shape.hidden;
      for (int d = 0; d < shape.hidden; d += kLanes)
        store(x_ + ptrdiff_t(i) * shape.hidden + d, load(from + d));
    });
  }

  // x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019); may be done in place.
  template <class Store>
  void norm_line(const float* x, const float* weight, int width, const Store& to) {
    F16 squares = splat(0.0f);
    for (int d = 0; d < width; d += kLanes) {
      const F16 part = load(x + d);
      squares = fma(part, part, squares);
    }
    const F16 factor = splat(1.0f / std::sqrt(sum(squares) / float(width) + shape.norm_eps));
    for (int d = 0; d < width; d += kLanes) to(d, load(x + d) * factor * load(weight + d));
  }

  void norm(const float* weight, int lines) {
    each_line(lines, [&](int i) {
      const ptrdiff_t at = ptrdiff_t(i) * shape.hidden;
      norm_line(x_ + at, weight, shape.hidden,
                [&](int d, const F16& y) { put<T>(normed_ + at + d, y); });
    });
  }

  // Queries, keys and values of all tokens; the latter two go into the arena.
  void project(int l, int lines, const std::vector<Row>& rows) {
    const LlamaLayer<T>& layer = layers[l];
    norm(layer.attention_norm, lines);
    const int width = qkv_width();
    spread(layer.qkv, normed_, shape.hidden, lines,
           [&](int row, int rows, int group, const float* block) {
             const int column = group * kGroup, left = std::min(kGroup, width - column);
             for (int i = 0; i < rows; ++i)
               std::memcpy(qkv_ + ptrdiff_t(row + i) * width + column, block + i * kGroup,
                           left * sizeof(float));
           });
    owner_.resize(lines);
    for (size_t r = 0; r < rows.size(); ++r)
      for (int i = 0; i < rows[r].count; ++i) owner_[rows[r].begin + i] = int(r);
    const Kv<T> kv{layout_, l};
    each_line(lines, [&](int i) {
      float* line = qkv_ + ptrdiff_t(i) * width;
      for (int h = 0; h < shape.heads + shape.kv_heads; ++h) {
        float* head = line + h * shape.head_dim;
        const float* weight = h < shape.heads ? layer.q_norm : layer.k_norm;
        if (weight)
          norm_line(head, weight, shape.head_dim, [&](int d, const F16& y) { store(head + d, y); });
        if (layer.rotate) rotate(head, position_[i]);
      }
      store_kv(kv, rows[owner_[i]], position_[i], line + q_width(), line + q_width() + kv_width());
    });
  }

  // Su et al. 2021, with the halves of a head as the pairs.
  void rotate(float* head, int position) {
    const int half = shape.rotary / 2;
    const float* cosine = rotary + ptrdiff_t(position) * shape.rotary;
    const float* sine = cosine + half;
    for (int d = 0; d < half; ++d) {
      const float a = head[d], b = head[d + half];
      head[d] = a * cosine[d] - b * sine[d];
      head[d + half] = b * cosine[d] + a * sine[d];
    }
  }

  void attend(int l, const std::vector<Row>& rows, int lines) {
    const LlamaLayer<T>& layer = layers[l];
    const Kv<T> kv{layout_, l};
    const AttentionKind kind{shape.scale, 0.0f, layer.window};
    const Crew crew = pool_.gather();
    Attention<T> attention(kv, kind, shape.heads, rows.data(), int(rows.size()), crew.threads);
    pool_.run(crew, [&](Seat& seat) {
      attention.take_part(seat, scratch_[seat.thread], qkv_, qkv_width(), attended_, q_width());
    });
    spread(layer.out, attended_, q_width(), lines, Add{*this});
  }

  void feed_forward(int l, int lines) {
    const LlamaLayer<T>& layer = layers[l];
    norm(layer.mlp_norm, lines);
    spread(layer.gate_up, normed_, shape.hidden, lines,
           [&](int row, int rows, int group, const float* block) {
             for (int i = 0; i < rows; ++i) {
               const F16 gate = load(block + i * kGroup), up = load(block + i * kGroup + kLanes);
               put<T>(gated_ + ptrdiff_t(row + i) * shape.intermediate + group * kLanes,
                      gate * sigmoid(gate) * up);
             }
           });
    spread(layer.down, gated_, shape.intermediate, lines, Add{*this});
  }

  // Adds a product to the residual stream.
  struct Add {
    LlamaOf& self;
    void operator()(int row, int rows, int group, const float* block) const {
      const int hidden = self.shape.hidden;
      for (int i = 0; i < rows; ++i) {
        float* x = self.x_ + ptrdiff_t(row + i) * hidden + group * kGroup;
        const int left = std::min(kGroup, hidden - group * kGroup);
        for (int d = 0; d < left; d += kLanes) store(x + d, load(x + d) + load(block + i * kGroup + d));
      }
    }
  };

  // Moves the kept tokens' lines to the front; returns rows of these alone.
  std::vector<Row> last_tokens(const std::vector<Row>& rows, const int32_t* keep, int kept) {
    std::vector<Row> last;
    for (int i = 0; i < kept; ++i) {
      const int from = keep[i];
      const Row& row = rows[owner_[from]];
      last.push_back({i, 1, position_[from], row.blocks_max, row.blocks, row.arena});
      std::memmove(x_ + ptrdiff_t(i) * shape.hidden, x_ + ptrdiff_t(from) * shape.hidden,
                   shape.hidden * sizeof(float));
      std::memmove(qkv_ + ptrdiff_t(i) * qkv_width(), qkv_ + ptrdiff_t(from) * qkv_width(),
                   qkv_width() * sizeof(float));
    }
    return last;
  }

  Layout layout_{};
  Pool pool_;
  std::vector<AttentionScratch<T>> scratch_;
  std::vector<int> position_, owner_;  // of each packed token
  Buffer<float> x_memory_, qkv_memory_;
  Buffer<Act<T>> normed_memory_, attended_memory_, gated_memory_;
  float* x_ = nullptr;           // [tokens][hidden]: the residual stream
  float* qkv_ = nullptr;         // [tokens][qkv_width]
  Act<T>* normed_ = nullptr;     // [tokens][hidden]
  Act<T>* attended_ = nullptr;   // [tokens][q_width]
  Act<T>* gated_ = nullptr;      // [tokens][intermediate]
};

}  // namespace baton

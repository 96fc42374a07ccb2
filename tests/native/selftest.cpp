// Every kernel against plain arithmetic in double, over random shapes, strides and lengths.
//
// One program for what Python cannot look at: other architectures (under an emulator) and memory
// errors (all memory has exactly the size that the kernels are told, so that a sanitizer sees one
// element too far). Built and run by scripts/check_kernels.py.
//   selftest SEED CASES
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels.cpp"

namespace {

std::mt19937_64 chance;

int between_both(int low, int high) { return low + int(chance() % (high - low + 1)); }
float normal() { return std::normal_distribution<float>()(chance); }

template <class... Parts>
[[noreturn]] void fail(const char* text, Parts... parts) {
  std::fprintf(stderr, text, parts...);
  std::fputc('\n', stderr);
  std::exit(1);
}

float as_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return uint16_t((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
}
template <class T>
float rounded(float x) {
  return sizeof(T) == 2 ? as_float(uint32_t(bf16_bits(x)) << 16) : x;
}
void put_element(float* p, float x) { *p = x; }
void put_element(Bf16* p, float x) { p->bits = bf16_bits(x); }

double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25)
                               : std::ldexp(double(fraction), -24);
  return bits & 0x8000 ? -size : size;
}
// Nothing, something subnormal, or 2 ** -9 to 2 ** -6 and `smaller` bits less.
uint16_t some_half(int smaller) {
  const int kind = between_both(0, 9), usual = between_both(0x1800, 0x23ff) - (smaller << 10);
  return uint16_t(kind == 0 ? 0 : kind == 1 ? between_both(1, 0x3ff) : usual);
}

// A matrix in double, and packed for the kernels.
struct Matrix {
  int n, k, kind;
  std::vector<double> values, sizes;  // [n][k]; what was added up for each value, without its sign
  std::vector<char> data;
  std::vector<float> bias;

  double at(int row, int column) const { return values[size_t(row) * k + column]; }
  PlainWeights plain() const {
    return {data.data(), bias.empty() ? nullptr : bias.data(), n, k, kind};
  }
};

template <class T>
void pack_full(Matrix& m) {
  constexpr int step = Product<T>::kStep;
  const int groups = (m.n + kGroup - 1) / kGroup;
  m.data.assign(size_t(groups) * kGroup * m.k * sizeof(T), 0);
  T* out = reinterpret_cast<T*>(m.data.data());
  for (int row = 0; row < m.n; ++row)
    for (int c = 0; c < m.k; ++c) {
      const float x = rounded<T>(normal() / std::sqrt(float(m.k)));
      m.values[size_t(row) * m.k + c] = x;
      m.sizes[size_t(row) * m.k + c] = std::fabs(x);
      const size_t line = size_t(row / kGroup) * (m.k / step) + c / step;
      put_element(out + (line * kGroup + row % kGroup) * step + c % step, x);
    }
}

template <class T, class Q>
void pack_slabs(Matrix& m) {
  constexpr int bits = Q::kLeast ? 4 : 8;
  const int groups = (m.n + kGroup - 1) / kGroup, count = m.k / kShared;
  m.data.assign(size_t(groups) * count * sizeof(Slab<Q>), 0);
  auto* slabs = reinterpret_cast<Slab<Q>*>(m.data.data());
  for (int row = 0; row < m.n; ++row)
    for (int s = 0; s < count; ++s) {
      Slab<Q>& slab = slabs[size_t(row / kGroup) * count + s];
      const int column = row % kGroup;
      // Weights are alike whatever they are made of: larger ones would make steps chaotic.
      slab.scale[column].bits = some_half(bits - 4);
      const double scale = half_value(slab.scale[column].bits);
      double least = 0;
      if constexpr (Q::kLeast) {
        // Mostly so that codes lie around zero: sums of one sign would make steps chaotic too.
        const int eightfold = slab.scale[column].bits + (3 << 10);
        slab.least[column].bits = uint16_t((between_both(0, 9) ? eightfold : some_half(0)) | 0x8000);
        least = half_value(slab.least[column].bits);
      }
      for (int c = 0; c < kShared; ++c) {
        const int code = Q::kLeast ? between_both(0, 15) : between_both(-127, 127);
        const int pair = c / 2 % Q::kPairs, word = c / 2 / Q::kPairs;
        slab.words[word][column] |= (uint32_t(code) & ((1u << bits) - 1))
                                    << (pair * bits + c % 2 * 16);
        const size_t at = size_t(row) * m.k + s * kShared + c;
        m.values[at] = scale * code + least;
        if (kCodesRounded<T>) m.values[at] = rounded<T>(float(m.values[at]));
        m.sizes[at] = std::fabs(scale * code) + std::fabs(least);
      }
    }
}

template <class T>
Matrix some_matrix(int n, int k, int kind, bool bias) {
  Matrix m{n, k, kind, std::vector<double>(size_t(n) * k), std::vector<double>(size_t(n) * k)};
  if (kind == kInt4) pack_slabs<T, Int4>(m);
  else if (kind == kInt8) pack_slabs<T, Int8>(m);
  else pack_full<T>(m);
  if (bias) {
    m.bias.resize((n + kGroup - 1) / kGroup * kGroup);
    for (float& x : m.bias) x = normal();
  }
  return m;
}

template <class T>
void check_product() {
  const int kind = between_both(0, 2);
  const int k = kind == kFull ? 2 * between_both(1, 200) : kShared * between_both(1, 7);
  const int n = between_both(1, 130), m = between_both(1, between_both(0, 3) ? 30 : 260);
  const ptrdiff_t lda = k + 2 * between_both(0, 9);
  const Matrix w = some_matrix<T>(n, k, kind, between_both(0, 1));
  std::vector<Act<T>> left((m - 1) * lda + k);
  std::vector<float> values(left.size());
  for (size_t i = 0; i < left.size(); ++i) {
    values[i] = rounded<T>(normal());
    put_element(&left[i], values[i]);
  }
  const auto computed = [&](int first, int rows) {
    std::vector<float> out(size_t(rows) * n);
    product<T>(w.plain().of<T>(), left.data() + first * lda, lda, rows,
               AllGroups{(n + kGroup - 1) / kGroup},
               [&](int row, int count, int group, const float* block) {
                 for (int i = 0; i < count; ++i)
                   for (int j = 0; j < std::min(kGroup, n - group * kGroup); ++j)
                     out[size_t(row + i) * n + group * kGroup + j] = block[i * kGroup + j];
               });
    return out;
  };
  const std::vector<float> found = computed(0, m);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double wanted = w.bias.empty() ? 0 : w.bias[j], size = std::fabs(wanted);
      for (int c = 0; c < k; ++c) {
        wanted += values[i * lda + c] * w.at(j, c);
        size += std::fabs(values[i * lda + c]) * w.sizes[size_t(j) * k + c];
      }
      if (!(std::fabs(found[size_t(i) * n + j] - wanted) <= 2e-5 * size + 1e-30))
        fail("product kind %d of %zu bytes, m %d n %d k %d: [%d, %d] is %g, not %g", kind,
             sizeof(T), m, n, k, i, j, found[size_t(i) * n + j], wanted);
    }
  const int first = between_both(0, m - 1), rows = between_both(1, m - first);
  const std::vector<float> some = computed(first, rows);
  if (std::memcmp(some.data(), &found[size_t(first) * n], some.size() * sizeof(float)))
    fail("product kind %d of %zu bytes, m %d n %d k %d: rows %d + %d are not their own", kind,
         sizeof(T), m, n, k, first, rows);
}

void check_functions() {
  float x[kLanes], out[kLanes];
  for (float& one : x) one = 20 * normal();
  store(out, exp2(load(x)));
  for (int i = 0; i < kLanes; ++i)
    if (!(std::fabs(out[i] - std::exp2(double(x[i]))) <= 3e-7 * std::exp2(double(x[i])) + 1e-37))
      fail("exp2(%g) is %g", x[i], out[i]);
  store(out, sigmoid(load(x)));
  for (int i = 0; i < kLanes; ++i)
    if (!(std::fabs(out[i] - 1 / (1 + std::exp(-double(x[i])))) <= 1e-6))
      fail("sigmoid(%g) is %g", x[i], out[i]);
  Bf16 narrow[kLanes];
  store(narrow, load(x));
  for (int i = 0; i < kLanes; ++i)
    if (narrow[i].bits != bf16_bits(x[i])) fail("%g was rounded to %x", x[i], narrow[i].bits);
}

// An arena of exactly the blocks that some sequences need, filled with NaN, in random order.
struct Arena {
  int block_size, count = 0;
  std::vector<char> memory;
  std::vector<std::vector<int32_t>> tables;

  Arena(const std::vector<int>& lengths, int block, ptrdiff_t block_bytes) : block_size(block) {
    for (int length : lengths) count += (length + block - 1) / block;
    std::vector<int32_t> order(count);
    for (int i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), chance);
    int at = 0;
    for (int length : lengths) {
      const int some = (length + block - 1) / block;
      tables.emplace_back(order.begin() + at, order.begin() + at + some);
      at += some;
    }
    memory.assign(size_t(count) * block_bytes, char(0xff));
  }
  Row row(int sequence, int begin, int tokens, int start) {
    return {begin, tokens, start, count, tables[sequence].data(), memory.data()};
  }
};

template <class T>
void check_attention() {
  const int kv_heads = between_both(1, 3), group = between_both(1, 9), heads = kv_heads * group;
  const int dim = 16 * between_both(1, 8), block = 16 << between_both(0, 2);
  const int window = between_both(0, 2) ? 0 : between_both(1, 200);
  const float softcap = between_both(0, 3) ? 0.0f : 5.0f, scale = 1 / std::sqrt(float(dim));
  const int sequences = between_both(1, 3);
  std::vector<int> before, fed, lengths;
  for (int s = 0; s < sequences; ++s) {
    before.push_back(between_both(0, 200));
    fed.push_back(between_both(0, 1) ? 1 : between_both(1, 60));
    lengths.push_back(before[s] + fed[s]);
  }
  const Layout layout{2, kv_heads, dim, block};
  Arena arena(lengths, block, layout.block() * ptrdiff_t(sizeof(T)));
  struct Line {
    std::vector<float> q, k, v;
  };
  std::vector<Line> lines;
  const auto some = [](size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = rounded<T>(normal());
    return out;
  };
  for (int length : lengths)
    lines.push_back({some(size_t(length) * heads * dim), some(size_t(length) * kv_heads * dim),
                     some(size_t(length) * kv_heads * dim)});
  void* pool = baton_pool_new(between_both(1, 2));
  const BatonAttention what{layout, sizeof(T) == 2, 1, heads, window, scale, softcap};
  const auto feed = [&](const std::vector<int>& starts, const std::vector<int>& counts) {
    std::vector<Row> rows;
    std::vector<float> q, k, v;
    int begin = 0;
    for (int s = 0; s < sequences; ++s) {
      if (counts[s] == 0) continue;
      rows.push_back(arena.row(s, begin, counts[s], starts[s]));
      begin += counts[s];
      const auto append = [&](std::vector<float>& to, const std::vector<float>& from, int width) {
        const auto first = from.begin() + ptrdiff_t(starts[s]) * width;
        to.insert(to.end(), first, first + ptrdiff_t(counts[s]) * width);
      };
      append(q, lines[s].q, heads * dim);
      append(k, lines[s].k, kv_heads * dim);
      append(v, lines[s].v, kv_heads * dim);
    }
    q.shrink_to_fit(), k.shrink_to_fit(), v.shrink_to_fit();
    std::vector<float> out(q.size());
    if (begin && baton_attend(&what, pool, rows.data(), int(rows.size()), begin, q.data(), k.data(),
                              v.data(), out.data()))
      fail("attention refused its rows");
    return out;
  };
  feed(std::vector<int>(sequences), before);
  const std::vector<float> out = feed(before, fed);
  baton_pool_free(pool);
  size_t at = 0;
  for (int s = 0; s < sequences; ++s)
    for (int place = before[s]; place < lengths[s]; ++place)
      for (int h = 0; h < heads; ++h, at += dim) {
        const int first = window ? std::max(0, place - window + 1) : 0;
        std::vector<double> weights, sums(dim);
        double total = 0;
        for (int key = first; key <= place; ++key) {
          double score = 0;
          for (int d = 0; d < dim; ++d)
            score += double(lines[s].q[(size_t(place) * heads + h) * dim + d]) *
                     lines[s].k[(size_t(key) * kv_heads + h / group) * dim + d];
          score *= scale;
          if (softcap) score = softcap * std::tanh(score / softcap);
          weights.push_back(std::exp(score));
          total += weights.back();
          for (int d = 0; d < dim; ++d)
            sums[d] += weights.back() *
                       lines[s].v[(size_t(key) * kv_heads + h / group) * dim + d];
        }
        for (int d = 0; d < dim; ++d)
          if (!(std::fabs(out[at + d] - sums[d] / total) <= (sizeof(T) == 2 ? 3e-2 : 1e-5)))
            fail("attention of %zu bytes, %d x %d heads of %d, block %d, window %d: %g, not %g",
                 sizeof(T), kv_heads, group, dim, block, window, out[at + d], sums[d] / total);
      }
}

// A small model of random weights, and its step in double.
struct Small {
  LlamaShape shape;
  std::vector<float> embedding, rotary, norm;
  struct Layer {
    Matrix qkv, out, gate_up, down;
  };
  std::vector<Layer> layers;
  Matrix head;

  static double normed(const std::vector<double>& x, const std::vector<float>& weight, float eps,
                       std::vector<double>& out) {
    double squares = 0;
    for (double one : x) squares += one * one;
    const double factor = 1 / std::sqrt(squares / double(x.size()) + eps);
    out.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * factor * weight[i];
    return factor;
  }
  static std::vector<double> times(const Matrix& w, const std::vector<double>& x) {
    std::vector<double> out(w.n);
    for (int j = 0; j < w.n; ++j) {
      out[j] = w.bias.empty() ? 0 : w.bias[j];
      for (int c = 0; c < w.k; ++c) out[j] += w.at(j, c) * x[c];
    }
    return out;
  }

  // Logits of the last of `ids`.
  std::vector<double> last(const std::vector<int32_t>& ids) const {
    const int dim = shape.head_dim, q = shape.heads * dim, kv = shape.kv_heads * dim;
    const int half = shape.rotary / 2, group = shape.heads / shape.kv_heads;
    std::vector<std::vector<double>> x(ids.size());
    for (size_t t = 0; t < ids.size(); ++t) {
      const float* line = &embedding[size_t(ids[t]) * shape.hidden];
      x[t].assign(line, line + shape.hidden);
    }
    std::vector<double> y;
    for (const Layer& layer : layers) {
      std::vector<std::vector<double>> lines;
      for (size_t t = 0; t < ids.size(); ++t) {
        normed(x[t], norm, shape.norm_eps, y);
        lines.push_back(times(layer.qkv, y));
        for (int h = 0; h < shape.heads + shape.kv_heads; ++h)
          for (int d = 0; d < half; ++d) {
            double &a = lines[t][h * dim + d], &b = lines[t][h * dim + d + half];
            const double cosine = rotary[t * shape.rotary + d],
                         sine = rotary[t * shape.rotary + half + d], old = a;
            a = old * cosine - b * sine;
            b = b * cosine + old * sine;
          }
      }
      for (size_t t = 0; t < ids.size(); ++t) {
        std::vector<double> mixed(q);
        for (int h = 0; h < shape.heads; ++h) {
          const int key = q + h / group * dim;
          double total = 0;
          std::vector<double> sums(dim);
          for (size_t other = 0; other <= t; ++other) {
            double score = 0;
            for (int d = 0; d < dim; ++d) score += lines[t][h * dim + d] * lines[other][key + d];
            const double weight = std::exp(score * shape.scale);
            total += weight;
            for (int d = 0; d < dim; ++d) sums[d] += weight * lines[other][key + kv + d];
          }
          for (int d = 0; d < dim; ++d) mixed[h * dim + d] = sums[d] / total;
        }
        const auto added = times(layer.out, mixed);
        for (int i = 0; i < shape.hidden; ++i) x[t][i] += added[i];
        normed(x[t], norm, shape.norm_eps, y);
        const auto both = times(layer.gate_up, y);
        std::vector<double> gated(shape.intermediate);
        for (int i = 0; i < shape.intermediate; ++i) {
          const int at = i / kLanes * 2 * kLanes + i % kLanes;
          gated[i] = both[at] / (1 + std::exp(-both[at])) * both[at + kLanes];
        }
        const auto down = times(layer.down, gated);
        for (int i = 0; i < shape.hidden; ++i) x[t][i] += down[i];
      }
    }
    normed(x.back(), norm, shape.norm_eps, y);
    return times(head, y);
  }
};

// Cores that may be borrowed, whose owners compute now and then.
class Lenders {
 public:
  Lenders() {
    cpu_set_t usable;
    CPU_ZERO(&usable);
    sched_getaffinity(0, sizeof usable, &usable);
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &usable)) cores.push_back(core);
    own_[0] = cores[0];
    const int count = between_both(0, 2);
    for (int i = 0; i < count; ++i)
      loans_[i] = cores[size_t(between_both(0, int(cores.size()) - 1))];
    lines_ = std::vector<CoreLine>(size_t(cores.back()) + 1);
    given = {lines_.data(), own_, loans_, 1, count};
    tell(kComputing);
  }
  ~Lenders() { be_busy(); }

  BatonCores given;

  void tell(uint64_t word) {
    for (int i = 0; i < given.loan_count; ++i) lines_[size_t(loans_[i])].word = word;
  }
  void be_restless() {
    changing_ = true;
    thread_ = std::thread([this, seed = chance()] {
      for (std::mt19937_64 own(seed); changing_;) {
        tell(own() % 4 == 0 ? kComputing : own() % 4 == 0 ? monotonic_ns() + 20'000 : 1);
        for (uint64_t i = own() % 3000; i > 0 && changing_; --i)
          std::atomic_signal_fence(std::memory_order_seq_cst);
      }
    });
  }
  void be_busy() {
    changing_ = false;
    if (thread_.joinable()) thread_.join();
    tell(kComputing);
  }

 private:
  int32_t own_[1], loans_[2];
  std::vector<CoreLine> lines_;
  std::atomic<bool> changing_{false};
  std::thread thread_;
};

// Whatever the crew, everything is done once, and nothing after `run` has returned.
void check_pool() {
  Lenders lenders;
  Pool pool(between_both(1, 3), cores_of(lenders.given));
  std::vector<std::atomic<int>> done(200);
  lenders.be_restless();
  pool.begin();
  for (int round = 1; round <= 300; ++round) {
    const int count = between_both(0, int(done.size())), most = between_both(1, 40);
    const Crew crew = pool.gather();
    Slices slices(count, crew, most);
    std::atomic<int> inside{0};
    pool.run(crew, [&](Seat& seat) {
      ++inside;
      if (seat.thread < 0 || seat.thread >= pool.most()) fail("a seat %d", seat.thread);
      for (int first, last; slices.next(seat, first, last);)
        for (int i = first; i < last; ++i) ++done[size_t(i)];
      --inside;
    });
    if (inside != 0) fail("round %d: somebody is still in the work", round);
    for (int i = 0; i < int(done.size()); ++i) {
      if (done[size_t(i)] != (i < count))
        fail("round %d: thing %d of %d was done %d times", round, i, count, int(done[size_t(i)]));
      done[size_t(i)] = 0;
    }
  }
  const double share = pool.end();
  if (!(share >= 0 && share <= 1)) fail("cores were borrowed for %g of the time", share);
}

template <class T>
void check_step() {
  const int kind = between_both(0, 2), unit = kind == kFull ? 16 : 32;
  Small model;
  const int kv_heads = between_both(1, 2), heads = kv_heads * 2, dim = 16 * between_both(1, 3);
  model.shape = {2, unit * between_both(1, 3), heads, kv_heads, dim, 32 * between_both(1, 3),
                 between_both(40, 90), 96, 16, dim, 1e-5f, 1 / std::sqrt(float(dim))};
  const LlamaShape& shape = model.shape;
  std::vector<T> embedding(size_t(shape.vocab) * shape.hidden);
  for (T& one : embedding) {
    model.embedding.push_back(rounded<T>(normal()));
    put_element(&one, model.embedding.back());
  }
  for (int i = 0; i < shape.context * shape.rotary / 2; ++i) {
    const int place = i / (shape.rotary / 2), d = i % (shape.rotary / 2);
    const double angle = place * std::pow(1e4, -2.0 * d / shape.rotary);
    model.rotary.resize(size_t(shape.context) * shape.rotary);
    model.rotary[place * shape.rotary + d] = float(std::cos(angle));
    model.rotary[place * shape.rotary + shape.rotary / 2 + d] = float(std::sin(angle));
  }
  for (int i = 0; i < shape.hidden; ++i) model.norm.push_back(1 + 0.1f * normal());
  const bool bias = between_both(0, 1);
  for (int l = 0; l < shape.layers; ++l)
    model.layers.push_back(
        {some_matrix<T>((heads + 2 * kv_heads) * dim, shape.hidden, kind, bias),
         some_matrix<T>(shape.hidden, heads * dim, kind == kFull || heads * dim % 32 ? kFull : kind,
                        false),
         some_matrix<T>(2 * shape.intermediate, shape.hidden, kind, false),
         some_matrix<T>(shape.hidden, shape.intermediate, kind, false)});
  model.head = some_matrix<T>(shape.vocab, shape.hidden, kind, false);
  std::vector<BatonLlamaLayer> layers;
  for (const auto& one : model.layers)
    layers.push_back({one.qkv.plain(), one.out.plain(), one.gate_up.plain(), one.down.plain(),
                      model.norm.data(), model.norm.data(), nullptr, nullptr, 0, 1});
  Lenders lenders;
  const BatonLlama given{shape,
                         sizeof(T) == 2,
                         between_both(1, 2),
                         embedding.data(),
                         model.rotary.data(),
                         model.norm.data(),
                         model.head.plain(),
                         layers.data(),
                         lenders.given};
  void* llama = baton_llama_new(&given);
  const int length = between_both(1, 70), other = between_both(1, 30);
  std::vector<int32_t> ids;
  for (int i = 0; i < length + other; ++i) ids.push_back(between_both(0, shape.vocab - 1));
  const Layout layout{shape.layers, kv_heads, dim, shape.block_size};
  // Both sequences whole, with cores that come and go; then the first one alone in two parts.
  const auto stepped = [&](bool together, int cut) {
    Arena arena({length, other}, shape.block_size, layout.block() * ptrdiff_t(sizeof(T)));
    std::vector<float> logits(size_t(shape.vocab) * (together ? 2 : 1));
    const Row rows[] = {arena.row(0, 0, length, 0), arena.row(1, length, other, 0)};
    const int32_t keep[] = {length - 1, length + other - 1};
    if (together) {
      if (baton_llama_step(llama, rows, 2, ids.data(), length + other, keep, 2) ||
          baton_llama_head(llama, 2, logits.data()))
        fail("the step refused its rows");
    } else {
      const Row first = arena.row(0, 0, cut, 0), rest = arena.row(0, 0, length - cut, cut);
      const int32_t end = length - cut - 1;
      if ((cut && baton_llama_step(llama, &first, 1, ids.data(), cut, nullptr, 0)) ||
          baton_llama_step(llama, &rest, 1, ids.data() + cut, length - cut, &end, 1) ||
          baton_llama_head(llama, 1, logits.data()))
        fail("the step refused a part");
    }
    return logits;
  };
  lenders.be_restless();
  baton_llama_begin(llama, 1);
  const auto found = stepped(true, 0);
  baton_llama_end(llama);
  lenders.be_busy();
  const auto alone = stepped(false, between_both(0, length - 1));
  baton_llama_free(llama);
  if (std::memcmp(found.data(), alone.data(), alone.size() * sizeof(float)))
    fail("a step of %zu bytes, kind %d: a sequence is not its own", sizeof(T), kind);
  const auto wanted = model.last({ids.begin(), ids.begin() + length});
  double errors = 0, squares = 0;
  for (int i = 0; i < shape.vocab; ++i) {
    errors += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    squares += wanted[i] * wanted[i];
  }
  // In bfloat16 activations are rounded after every part of a layer.
  const double share = std::sqrt(errors / squares);
  if (!(share <= (sizeof(T) == 2 ? 0.03 : 1e-3)))
    fail("a step of %zu bytes, kind %d, hidden %d: off by %g of the logits", sizeof(T), kind,
         shape.hidden, share);
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) fail("usage: %s SEED CASES", words[0]);
  if (!baton_granted()) fail("the kernel does not let this process use the level's registers");
  const unsigned long seed = std::strtoul(words[1], nullptr, 10);
  const int cases = std::atoi(words[2]);
  for (int number = 0; number < cases; ++number) {
    chance.seed(seed + number);
    std::fprintf(stderr, "\r%lu ", seed + number);
    check_functions();
    check_pool();
    check_product<float>();
    check_product<Bf16>();
    check_attention<float>();
    check_attention<Bf16>();
    check_step<float>();
    check_step<Bf16>();
  }
  std::printf("%d cases from seed %lu: every kernel agrees\n", cases, seed);
}

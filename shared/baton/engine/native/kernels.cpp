// The C interface of the compiled kernels, called through ctypes (`baton.engine.native`).
//
// Decides what crosses the border: plain structs of ints and pointers, which `baton.engine.native.abi`
// mirrors field for field. Everything is checked here that would otherwise read or write memory that
// is not the caller's.
#include "llama.h"

using namespace baton;

namespace {

// What a refused call returns; a step whose result is not finite was done all the same.
enum Refusal { kNotFinite = -1, kFine = 0, kBadToken = 1, kBadPosition = 2, kBadBlock = 3, kBadRows = 4 };

enum Dtype { kFloat32 = 0, kBfloat16 = 1 };

struct PlainWeights {
  const void* data;
  const float* bias;
  int32_t n, k, kind;

  template <class T>
  Weights<T> of() const {
    return {data, bias, n, k, kind};
  }
};

Refusal check_rows(const Row* rows, int count, int tokens, int block_size) {
  int at = 0;
  for (int r = 0; r < count; ++r) {
    const Row& row = rows[r];
    if (row.begin != at || row.count < 1 || row.start < 0) return kBadRows;
    at += row.count;
    const int used = (row.start + row.count - 1) / block_size + 1;
    for (int i = 0; i < used; ++i)
      if (row.blocks[i] < 0 || row.blocks[i] >= row.blocks_max) return kBadBlock;
  }
  return at == tokens ? kFine : kBadRows;
}

}  // namespace

extern "C" {

#define BATON_EXPORT __attribute__((visibility("default")))

struct BatonLlamaLayer {
  PlainWeights qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
  int32_t window, rotate;
};

// Cores of this worker and those it may borrow; `lines` null: nobody lends.
struct BatonCores {
  void* lines;  // of all cores, see board.h
  const int32_t *own, *loans;
  int32_t own_count, loan_count;
};

struct BatonLlama {
  LlamaShape shape;
  int32_t dtype, threads;
  const void* embedding;
  const float *rotary, *final_norm;
  PlainWeights head;
  const BatonLlamaLayer* layers;
  BatonCores cores;
};

struct BatonAttention {
  Layout layout;
  int32_t dtype, layer, heads, window;
  float scale, softcap;
};

}  // extern "C"

namespace {

Cores cores_of(const BatonCores& given) {
  Cores found;
  CoreLine* lines = static_cast<CoreLine*>(given.lines);
  if (!lines) return found;
  for (int i = 0; i < given.own_count; ++i) found.own.push_back(lines + given.own[i]);
  for (int i = 0; i < given.loan_count; ++i)
    found.loans.push_back({given.loans[i], lines + given.loans[i]});
  return found;
}

template <class T>
Llama* make_llama(const BatonLlama& given) {
  auto made = std::make_unique<LlamaOf<T>>(given.shape, given.threads, cores_of(given.cores));
  made->embedding = static_cast<const T*>(given.embedding);
  made->rotary = given.rotary;
  made->final_norm = given.final_norm;
  made->output = given.head.of<T>();
  for (int i = 0; i < given.shape.layers; ++i) {
    const BatonLlamaLayer& l = given.layers[i];
    made->layers.push_back({l.qkv.of<T>(), l.out.of<T>(), l.gate_up.of<T>(), l.down.of<T>(),
                            l.attention_norm, l.mlp_norm, l.q_norm, l.k_norm, l.window,
                            l.rotate != 0});
  }
  return made.release();
}

template <class T>
void attend(const BatonAttention& what, Pool& pool, const Row* rows, int count, const float* query,
            const float* key, const float* value, float* out) {
  const Kv<T> kv{what.layout, what.layer};
  const AttentionKind kind{what.scale, what.softcap, what.window};
  const ptrdiff_t token = ptrdiff_t(what.layout.kv_heads) * what.layout.head_dim,
                  width = ptrdiff_t(what.heads) * what.layout.head_dim;
  for (int r = 0; r < count; ++r)
    for (int i = 0; i < rows[r].count; ++i) {
      const ptrdiff_t at = (rows[r].begin + i) * token;
      store_kv(kv, rows[r], rows[r].start + i, key + at, value + at);
    }
  const Crew crew = pool.gather();
  Attention<T> attention(kv, kind, what.heads, rows, count, crew.threads);
  pool.run(crew, [&](Seat& seat) {
    thread_local std::unique_ptr<AttentionScratch<T>> scratch;
    if (!scratch || scratch->width != what.layout.head_dim)
      scratch = std::make_unique<AttentionScratch<T>>(what.layout.head_dim);
    attention.take_part(seat, *scratch, query, width, out, width);
  });
}

template <class T>
void multiply_all(const PlainWeights& plain, const float* a, int m, float* out) {
  const Weights<T> w = plain.of<T>();
  std::vector<Act<T>> left(size_t(m) * w.k + kLanes);
  for (size_t i = 0; i < size_t(m) * w.k; i += kLanes) {
    float line[kLanes] = {};
    Act<T> rounded[kLanes];
    const size_t some = std::min<size_t>(kLanes, size_t(m) * w.k - i);
    std::memcpy(line, a + i, some * sizeof(float));
    put<T>(rounded, load(line));
    std::memcpy(static_cast<void*>(&left[i]), rounded, some * sizeof(Act<T>));
  }
  product<T>(w, left.data(), w.k, m, AllGroups{w.groups()},
             [&](int row, int rows, int group, const float* block) {
               const int column = group * kGroup, some = std::min(kGroup, w.n - column);
               for (int i = 0; i < rows; ++i)
                 std::memcpy(out + ptrdiff_t(row + i) * w.n + column, block + i * kGroup,
                             some * sizeof(float));
             });
}

}  // namespace

extern "C" {

BATON_EXPORT int32_t baton_abi() { return 4; }

// Whether the kernel lets this process use the level's registers; must be asked before anything else.
BATON_EXPORT int32_t baton_granted() {
#if defined(__AMX_BF16__)
  return grant_tiles();
#else
  return 1;
#endif
}

BATON_EXPORT void* baton_llama_new(const BatonLlama* given) {
  return given->dtype == kBfloat16 ? make_llama<Bf16>(*given) : make_llama<float>(*given);
}

BATON_EXPORT void baton_llama_free(void* llama) { delete static_cast<Llama*>(llama); }

// See Llama::step; returns a Refusal, and then nothing was done.
BATON_EXPORT int32_t baton_llama_step(void* handle, const Row* rows, int32_t count,
                                      const int32_t* ids, int32_t tokens, const int32_t* keep,
                                      int32_t kept) {
  Llama& llama = *static_cast<Llama*>(handle);
  const LlamaShape& shape = llama.shape;
  if (const Refusal refusal = check_rows(rows, count, tokens, shape.block_size)) return refusal;
  for (int r = 0; r < count; ++r)
    if (rows[r].start + rows[r].count > shape.context) return kBadPosition;
  for (int i = 0; i < tokens; ++i)
    if (ids[i] < 0 || ids[i] >= shape.vocab) return kBadToken;
  for (int i = 0; i < kept; ++i)
    if (keep[i] < 0 || keep[i] >= tokens || (i > 0 && keep[i] <= keep[i - 1])) return kBadRows;
  return llama.step(rows, count, ids, tokens, keep, kept) ? kFine : kNotFinite;
}

// See Llama::head; refused unless the step before kept so many.
BATON_EXPORT int32_t baton_llama_head(void* handle, int32_t kept, float* logits) {
  Llama& llama = *static_cast<Llama*>(handle);
  if (kept < 1 || kept != llama.kept) return kBadRows;
  llama.head(logits);
  return kFine;
}

// See Pool::claim.
BATON_EXPORT void baton_llama_claim(void* handle) { static_cast<Llama*>(handle)->claim(); }

// A step begins: nobody else computes on this worker's cores. It may borrow others', or not.
BATON_EXPORT void baton_llama_begin(void* handle, int32_t borrows) {
  static_cast<Llama*>(handle)->begin(borrows != 0);
}

// It has ended; returns for which share of it cores of other workers were borrowed.
BATON_EXPORT double baton_llama_end(void* handle) { return static_cast<Llama*>(handle)->end(); }

BATON_EXPORT void* baton_pool_new(int32_t threads) { return new Pool(threads); }

BATON_EXPORT void baton_pool_free(void* pool) { delete static_cast<Pool*>(pool); }

// Stores the step's K and V of one layer, then attends. query and out: float [tokens][heads]
// [head_dim]; key, value: float [tokens][kv_heads][head_dim].
BATON_EXPORT int32_t baton_attend(const BatonAttention* what, void* pool, const Row* rows,
                                  int32_t count, int32_t tokens, const float* query,
                                  const float* key, const float* value, float* out) {
  if (const Refusal refusal = check_rows(rows, count, tokens, what->layout.block_size))
    return refusal;
  Pool& threads = *static_cast<Pool*>(pool);
  what->dtype == kBfloat16 ? attend<Bf16>(*what, threads, rows, count, query, key, value, out)
                           : attend<float>(*what, threads, rows, count, query, key, value, out);
  return kFine;
}

// out [m][n] = a [m][k] * w^T; for tests.
BATON_EXPORT void baton_product(int32_t dtype, const PlainWeights* w, const float* a, int32_t m,
                                float* out) {
  dtype == kBfloat16 ? multiply_all<Bf16>(*w, a, m, out) : multiply_all<float>(*w, a, m, out);
}

// out[i] = 2 ** x[i]; for tests. `count` is a multiple of 16.
BATON_EXPORT void baton_exp2(const float* x, int32_t count, float* out) {
  for (int i = 0; i < count; i += kLanes) store(out + i, exp2(load(x + i)));
}

}  // extern "C"

// Ragged paged attention that reads keys and values where they lie.
//
// A KV head of some queries of one row is one task: keys are taken kTileKeys at a time
// from the row's first on, transposed so that lanes are keys, and folded into a running
// softmax (FlashAttention, Dao et al., 2022). Tiles begin at multiples of kTileKeys and
// sums go in order, so that what a query gets does not depend, to the last bit, on the
// queries that are computed beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace jaxkv {

constexpr int kTileKeys = 64;
constexpr int kTileVectors = kTileKeys / kLanes;
constexpr int64_t kTaskQueries = 16;  // of a row; a task has as many for each head
constexpr int kTogether = kLanes == 16 ? 6 : 3;  // queries in registers
constexpr int kAbreast = kLanes == 16 ? 4 : 3;   // and vectors of keys or dims
constexpr int64_t kRuns = 32;  // a thread takes several tasks if there are more
constexpr int64_t kLongestRun = 8;
constexpr int64_t kRunKeys = 16;  // values read in place at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct AttentionTask {
  int64_t row, first_query, num_queries, kv_head;
};

// What a thread keeps while it does a task.
struct AttentionScratch {
  AttentionScratch(int64_t queries, int64_t head_dim)
      : dims((head_dim + kLanes - 1) / kLanes * kLanes),
        q(std::make_unique_for_overwrite<float[]>(queries * head_dim)),
        keys(std::make_unique_for_overwrite<float[]>(dims * kTileKeys)),
        values(std::make_unique_for_overwrite<float[]>(kTileKeys * dims)),
        weights(std::make_unique_for_overwrite<float[]>(queries * kTileKeys)),
        sums(queries * dims),
        top(queries, -kInfinity),
        total(queries) {}

  int64_t dims;                        // head_dim, padded
  std::unique_ptr<float[]> q;        // [queries, head_dim]
  std::unique_ptr<float[]> keys;     // [dims, kTileKeys]
  std::unique_ptr<float[]> values;   // [kTileKeys, dims]
  std::unique_ptr<float[]> weights;  // [queries, kTileKeys], first scores
  std::vector<float> sums;           // [queries, dims]
  std::vector<float> top;            // [queries], the largest score
  std::vector<float> total;          // [queries], of exp(score - top)
};

// Where the keys of a tile lie, and its values: elements from the head's first on.
struct TileLines {
  int64_t count = 0;
  int64_t line[kTileKeys];
};

inline TileLines Locate(const Attention& a, int64_t row, int64_t begin, int64_t end) {
  TileLines lines;
  const int32_t* table = a.block_tables + row * a.width;
  int64_t place = begin / a.block_size, slot = begin % a.block_size;
  lines.count = std::clamp<int64_t>(end - begin, 0, kTileKeys);
  for (int64_t i = 0; i < lines.count; ++place, slot = 0) {
    const int64_t block = std::clamp<int64_t>(table[place], 0, a.num_blocks - 1);
    const int64_t first = block * a.kv_heads * a.block_size * a.head_dim;
    for (; slot < a.block_size && i < lines.count; ++slot, ++i)
      lines.line[i] = first + slot * a.head_dim;
  }
  return lines;
}

// Fetches the keys or values of a tile, one each time.
template <class T>
class Ahead {
 public:
  Ahead(const T* head, const TileLines& lines, int64_t head_dim)
      : head_(head), lines_(lines), bytes_(head_dim * sizeof(T)) {}

  void Fetch() {
    if (next_ == lines_.count) return;
    const char* line = reinterpret_cast<const char*>(head_ + lines_.line[next_++]);
    for (int64_t i = 0; i < bytes_; i += kLineBytes) Prefetch(line + i);
  }

 private:
  const T* head_;
  const TileLines& lines_;
  int64_t bytes_, next_ = 0;
};

template <class T>
inline Floats LoadPart(const T* line, int64_t first, int64_t length) {
  if (first + kLanes <= length) return LoadFloats(line + first);
  return LoadFloats(line + first, length - first);
}

// How queries are multiplied with keys: element by element, in float32,
template <class Q, class T>
struct ByElements {
  using Query = Q;
  using Key = T;
  static constexpr int kElements = 1;
  static Floats Add(Floats sum, float query, Floats key) {
    return sum + Broadcast(query) * key;
  }
};

#if defined(__AVX512BF16__)
// or by pairs of bfloat16 elements, each pair in the place of a float32.
struct ByPairs {
  using Query = float;
  using Key = float;
  static constexpr int kElements = 2;
  static Floats Add(Floats sum, float query, Floats key) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, std::bit_cast<__m512bh>(Broadcast(query)),
                                    std::bit_cast<__m512bh>(key));
  }
};
#endif

// Reads a tile's keys, of `length` elements or pairs of type Key each, lanes being keys;
// where the tile has none there are zeros.
template <class Key, class T>
void ReadKeys(const T* head, const TileLines& lines, int64_t length, Ahead<T> ahead,
              AttentionScratch& s) {
  for (int64_t key = 0; key < kTileKeys; key += kLanes) {
    const int64_t* line = lines.line + key;
    const int num_lines = std::clamp<int64_t>(lines.count - key, 0, kLanes);
    for (int i = 0; i < num_lines; ++i) ahead.Fetch();
    const Key* of_line[kLanes];
    for (int i = 0; i < kLanes; ++i)
      of_line[i] = i < num_lines ? reinterpret_cast<const Key*>(head + line[i]) : nullptr;
    float* columns = &s.keys[key];
    for (int64_t dim = 0; dim < length; dim += kLanes, columns += kLanes * kTileKeys) {
      Floats rows[kLanes];
      if (num_lines == kLanes && dim + kLanes <= length) {
        LoadTransposed(of_line, dim, rows);
      } else {
        for (int i = 0; i < kLanes; ++i)
          rows[i] = i < num_lines ? LoadPart(of_line[i], dim, length) : Floats{};
        Transpose(rows);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) StoreFloats(columns + i * kTileKeys, rows[i]);
    }
  }
}

template <class T>
void ReadValues(const T* head, const TileLines& lines, int64_t head_dim, Ahead<T> ahead,
                AttentionScratch& s) {
  for (int64_t key = 0; key < lines.count; ++key) {
    ahead.Fetch();
    const T* line = head + lines.line[key];
    for (int64_t dim = 0; dim < s.dims; dim += kLanes)
      StoreFloats(&s.values[key * s.dims + dim], LoadPart(line, dim, head_dim));
  }
}

// scores[i, key] = sum of q[i, dim] * keys[dim, key] for kM queries and kN vectors of
// keys.
template <int kM, int kN, class S>
inline void Score(const float* q, int64_t length, const float* keys, float* scores) {
  Floats sums[kM][kN] = {};
  for (int64_t dim = 0; dim < length; ++dim) {
    Floats key[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) key[j] = LoadFloats(keys + dim * kTileKeys + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j)
        sums[i][j] = S::Add(sums[i][j], q[i * length + dim], key[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j)
      StoreFloats(scores + i * kTileKeys + j * kLanes, sums[i][j]);
  }
}

// sums[i, dim] += sum of weights[i, key] * values[key, dim] for kM queries and kN
// vectors of dims.
template <int kM, int kN, class T>
inline void AddValues(const float* weights, const T* values, int64_t stride,
                      int64_t count, float* sums, int64_t dims) {
  Floats sum[kM][kN];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) sum[i][j] = LoadFloats(sums + i * dims + j * kLanes);
  }
  for (int64_t key = 0; key < count; ++key) {
    Floats value[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) value[j] = LoadFloats(values + key * stride + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      Floats factor = Broadcast(weights[i * kTileKeys + key]);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) sum[i][j] += factor * value[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) StoreFloats(sums + i * dims + j * kLanes, sum[i][j]);
  }
}

// Calls function(first, constant) for vectors kAbreast at a time, then one at a time.
template <class Function>
inline void ForVectors(int64_t vectors, const Function& function) {
  int64_t i = 0;
  for (; i + kAbreast <= vectors; i += kAbreast)
    function(i * kLanes, std::integral_constant<int, kAbreast>{});
  for (; i < vectors; ++i) function(i * kLanes, std::integral_constant<int, 1>{});
}

// Calls function(first, constant) for queries kTogether at a time, then for the rest.
template <int kM = kTogether, class Function>
inline void ForQueries(int64_t queries, const Function& function, int64_t first = 0) {
  for (; first + kM <= queries; first += kM)
    function(first, std::integral_constant<int, kM>{});
  if constexpr (kM > 1) ForQueries<kM - 1>(queries, function, first);
}

// Turns one query's scores of a tile into weights, and brings its sums to their scale.
// Of the keys, those in [first, last] are seen.
inline void Weigh(const Attention& a, int64_t first, int64_t last, int64_t query,
                  AttentionScratch& s) {
  float* weights = &s.weights[query * kTileKeys];
  first = std::clamp<int64_t>(first, 0, kTileKeys);
  last = std::clamp<int64_t>(last, -1, kTileKeys - 1);
  Floats scores[kTileVectors];
  Floats tops = Broadcast(-kInfinity);  // of NaN: of the others
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 16
  for (int j = 0; j < kTileVectors; ++j) {
    scores[j] = LoadFloats(weights + j * kLanes) * a.scale;
    if (a.soft_cap > 0) {
      for (int i = 0; i < kLanes; ++i)
        scores[j][i] = a.soft_cap * std::tanh(scores[j][i] / a.soft_cap);
    }
    Ints key = lane + j * kLanes;
    scores[j] = Select((key >= (int32_t)first) & (key <= (int32_t)last), scores[j],
                       Broadcast(-kInfinity));
    tops = Max(scores[j], tops);
  }
  const float old_top = s.top[query];
  const float top = std::max(old_top, MaxLane(tops));
  const float shift = top == -kInfinity ? 0.0f : top;
  Floats sum = {};
#pragma GCC unroll 16
  for (int j = 0; j < kTileVectors; ++j) {
    Floats weight = Exp(scores[j] - shift);
    StoreFloats(weights + j * kLanes, weight);
    sum += weight;
  }
  float added[kLanes];
  SumLanes<1>(&sum, added);
  float decay = 1.0f;
  if (top != old_top) {
    decay = Exp(Broadcast(old_top - shift))[0];
    float* sums = &s.sums[query * s.dims];
    for (int64_t dim = 0; dim < s.dims; dim += kLanes)
      StoreFloats(sums + dim, LoadFloats(sums + dim) * decay);
  }
  s.total[query] = s.total[query] * decay + added[0];
  s.top[query] = top;
}

// The keys that a task reads, whole tiles from the first on.
struct TaskKeys {
  TaskKeys(const Attention& a, const AttentionTask& task) {
    const int64_t q_len = a.cu_q_lens[task.row + 1] - a.cu_q_lens[task.row];
    position = a.kv_lens[task.row] - q_len + task.first_query;
    end = std::clamp<int64_t>(position + task.num_queries, 0, a.width * a.block_size);
    const int64_t first =
        a.window > 0 ? std::max<int64_t>(position - a.window + 1, 0) : 0;
    start = first / kTileKeys * kTileKeys;
  }

  int64_t position;  // of the task's first query
  int64_t start, end;
};

// Computes a task's outputs. At its end it fetches the first keys of the one after it.
template <class Q, class T, class S>
void DoTask(const Attention& a, const AttentionTask& task, const AttentionTask* after) {
  const int64_t length = a.head_dim / S::kElements;
  const int64_t group = a.q_heads / a.kv_heads;
  const int64_t queries = task.num_queries * group;  // of all heads, query by query
  const int64_t first_token = a.cu_q_lens[task.row] + task.first_query;
  const auto [position, start, end] = TaskKeys(a, task);
  auto of_token = [&](auto* heads, int64_t query, int64_t per_head) {
    int64_t token = first_token + query / group;
    return heads + (token * a.q_heads + task.kv_head * group + query % group) * per_head;
  };

  AttentionScratch s(queries, a.head_dim);
  for (int64_t i = 0; i < queries; ++i) {
    const Q* q = of_token(static_cast<const Q*>(a.q), i, a.head_dim);
    for (int64_t dim = 0; dim < length; ++dim) {
      auto element = reinterpret_cast<const typename S::Query*>(q)[dim];
      s.q[i * length + dim] = ToFloat(element);
    }
  }

  auto of_head = [&](const void* blocks, const AttentionTask& task) {
    return static_cast<const T*>(blocks) + task.kv_head * a.block_size * a.head_dim;
  };
  const T* keys = of_head(a.k, task);
  const T* values = of_head(a.v, task);
  const bool in_place = queries <= kTogether && s.dims == a.head_dim;
  TileLines next = Locate(a, task.row, start, end);
  for (int64_t tile = start; tile < end; tile += kTileKeys) {
    const TileLines lines = next;
    const AttentionTask* next_task = &task;
    if (tile + kTileKeys < end) {
      next = Locate(a, task.row, tile + kTileKeys, end);
    } else if (after != nullptr) {
      next_task = after;
      const TaskKeys next_keys(a, *after);
      next = Locate(a, after->row, next_keys.start, next_keys.end);
    } else {
      next.count = 0;
    }
    ReadKeys<typename S::Key>(keys, lines, length,
                              Ahead<T>(of_head(a.k, *next_task), next, a.head_dim), s);
    ForQueries(queries, [&](int64_t i, auto together) {
      ForVectors(kTileVectors, [&](int64_t key, auto abreast) {
        Score<together, abreast, S>(&s.q[i * length], length, &s.keys[key],
                                    &s.weights[i * kTileKeys + key]);
      });
    });
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t seen = position + i / group - tile;
      const int64_t last = std::min(seen, lines.count - 1);
      Weigh(a, a.window > 0 ? seen - a.window + 1 : 0, last, i, s);
    }
    Ahead<T> ahead(of_head(a.v, *next_task), next, a.head_dim);
    auto add = [&](const auto* lines, int64_t stride, int64_t first, int64_t count) {
      ForQueries(queries, [&](int64_t i, auto together) {
        ForVectors(s.dims / kLanes, [&](int64_t dim, auto abreast) {
          AddValues<together, abreast>(&s.weights[i * kTileKeys + first], lines + dim,
                                       stride, count, &s.sums[i * s.dims + dim], s.dims);
        });
      });
    };
    if (!in_place) {
      ReadValues(values, lines, a.head_dim, ahead, s);
      add(s.values.get(), s.dims, 0, lines.count);
      continue;
    }
    for (int64_t key = 0, run; key < lines.count; key += run) {
      for (run = 0; run < kRunKeys && key + run < lines.count; ++run) {
        if (lines.line[key + run] != lines.line[key] + run * a.head_dim) break;
        ahead.Fetch();
      }
      add(values + lines.line[key], a.head_dim, key, run);
    }
  }

  for (int64_t i = 0; i < queries; ++i) {
    Q* out = of_token(static_cast<Q*>(a.out), i, a.head_dim);
    const bool is_empty = s.total[i] == 0;
    float* sums = &s.sums[i * s.dims];
    for (int64_t dim = 0; dim < a.head_dim; dim += kLanes) {
      Floats result = LoadFloats(sums + dim) / s.total[i];
      if (is_empty) result = Floats{};
      StoreFloats(out + dim, result, std::min<int64_t>(kLanes, a.head_dim - dim));
    }
    *of_token(a.lse, i, 1) = is_empty ? -kInfinity : s.top[i] + std::log(s.total[i]);
  }
}

template <class Q, class T, class S>
void AttendBy(const Attention& a, const ParallelFor& parallel_for) {
  std::vector<AttentionTask> tasks;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t q_len = a.cu_q_lens[row + 1] - a.cu_q_lens[row];
    for (int64_t first = 0; first < q_len; first += kTaskQueries) {
      for (int64_t head = 0; head < a.kv_heads; ++head)
        tasks.push_back({row, first, std::min(kTaskQueries, q_len - first), head});
    }
  }
  const int64_t num_tokens = a.cu_q_lens[a.rows];
  Q* out = static_cast<Q*>(a.out);
  const int64_t first_token = std::min<int64_t>(a.cu_q_lens[0], a.tokens);
  std::fill(out, out + first_token * a.q_heads * a.head_dim, Q{});
  std::fill(a.lse, a.lse + first_token * a.q_heads, -kInfinity);
  std::fill(out + num_tokens * a.q_heads * a.head_dim,
            out + a.tokens * a.q_heads * a.head_dim, Q{});
  std::fill(a.lse + num_tokens * a.q_heads, a.lse + a.tokens * a.q_heads, -kInfinity);
  const int64_t count = tasks.size();
  const int64_t run = std::clamp<int64_t>(count / kRuns, 1, kLongestRun);
  parallel_for((count + run - 1) / run, [&](int64_t i) {
    for (int64_t j = i * run; j < std::min((i + 1) * run, count); ++j)
      DoTask<Q, T, S>(a, tasks[j], j + 1 < count ? &tasks[j + 1] : nullptr);
  });
}

template <class Q, class T>
void AttendTyped(const Attention& a, const ParallelFor& parallel_for) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Q, BFloat16> && std::is_same_v<T, BFloat16>) {
    if (a.head_dim % 2 == 0) return AttendBy<Q, T, ByPairs>(a, parallel_for);
  }
#endif
  AttendBy<Q, T, ByElements<Q, T>>(a, parallel_for);
}

template <class Q>
void AttendFrom(const Attention& a, const ParallelFor& parallel_for) {
  if (a.kv_type == Type::kFloat32)
    AttendTyped<Q, float>(a, parallel_for);
  else
    AttendTyped<Q, BFloat16>(a, parallel_for);
}

inline void Attend(const Attention& a, const ParallelFor& parallel_for) {
  if (a.q_type == Type::kFloat32)
    AttendFrom<float>(a, parallel_for);
  else
    AttendFrom<BFloat16>(a, parallel_for);
}

}  // namespace jaxkv

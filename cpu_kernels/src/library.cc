// What XLA calls. Compiled once for each instruction set, into a library of its own.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "kernels.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkv {
namespace {

namespace ffi = xla::ffi;
using IntVector = ffi::Buffer<ffi::S32, 1>;
using IntMatrix = ffi::Buffer<ffi::S32, 2>;
using FloatMatrix = ffi::Buffer<ffi::F32, 2>;

// Tasks that threads of XLA's pool help with. The caller does all that nobody else has
// begun, so nothing waits for a thread to become free.
class Shared {
 public:
  Shared(int64_t count, const std::function<void(int64_t)>* task)
      : count_(count), task_(task) {}

  void Work() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) {
      (*task_)(i);  // it lives while any task is not done
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Wait() const {
    while (done_.load(std::memory_order_acquire) < count_) __builtin_ia32_pause();
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>* task_;
  std::atomic<int64_t> next_ = 0, done_ = 0;
};

ParallelFor On(ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& task) {
    int64_t helpers = std::min(pool.num_threads(), count) - 1;
    if (helpers < 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    auto shared = std::make_shared<Shared>(count, &task);
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->Work(); });
    shared->Work();
    shared->Wait();
  };
}

std::optional<Type> TypeOf(const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::F32) return Type::kFloat32;
  if (buffer.element_type() == ffi::BF16) return Type::kBFloat16;
  return std::nullopt;
}

ffi::Error Refuse(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

ffi::Error MultiplyImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                        ffi::RemainingRets results) {
  auto type = TypeOf(x);
  if (x.dimensions().size() != 2 || !type) return Refuse("x");
  if (weights.size() != results.size()) return Refuse("results");
  Products p = {};
  p.x = x.untyped_data();
  p.tokens = x.dimensions()[0];
  p.in_dim = x.dimensions()[1];
  p.type = *type;
  std::vector<Weight> items;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!w.has_value() || !y.has_value()) return Refuse("buffers");
    auto w_dims = w->dimensions(), y_dims = (*y)->dimensions();
    auto result_type = TypeOf(**y);
    if (w_dims.size() != 2 || w_dims[1] != p.in_dim || TypeOf(*w) != type)
      return Refuse("weights");
    if (y_dims.size() != 2 || y_dims[0] != p.tokens || y_dims[1] != w_dims[0] ||
        !result_type || (i > 0 && *result_type != p.result_type))
      return Refuse("results");
    p.result_type = *result_type;
    items.push_back({w->untyped_data(), (*y)->untyped_data(), w_dims[0]});
  }
  p.weights = items.data();
  p.num_weights = items.size();
  Multiply(p, On(pool));
  return ffi::Error::Success();
}

ffi::Error NormalizeImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                         ffi::Result<ffi::AnyBuffer> y, float eps) {
  auto type = TypeOf(x);
  if (x.dimensions().size() != 2 || !type || TypeOf(weight) != type || TypeOf(*y) != type)
    return Refuse("types");
  if (weight.dimensions().size() != 1 || weight.dimensions()[0] != x.dimensions()[1] ||
      x.dimensions() != y->dimensions())
    return Refuse("shapes");
  Norms n = {};
  n.x = x.untyped_data();
  n.weight = weight.untyped_data();
  n.y = y->untyped_data();
  n.count = x.dimensions()[0];
  n.dim = x.dimensions()[1];
  n.type = *type;
  n.eps = eps;
  Normalize(n, On(pool));
  return ffi::Error::Success();
}

ffi::Error GateImpl(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                    ffi::Result<ffi::AnyBuffer> y) {
  auto type = TypeOf(gate);
  if (!type || TypeOf(up) != type || TypeOf(*y) != type) return Refuse("types");
  if (gate.dimensions() != up.dimensions() || gate.dimensions() != y->dimensions())
    return Refuse("shapes");
  Gates g = {};
  g.gate = gate.untyped_data();
  g.up = up.untyped_data();
  g.y = y->untyped_data();
  g.count = gate.element_count();
  g.type = *type;
  Gate(g, On(pool));
  return ffi::Error::Success();
}

ffi::Error AttendImpl(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                      ffi::AnyBuffer v, IntMatrix block_tables,
                      IntVector kv_lens,
                      IntVector cu_q_lens, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<FloatMatrix> lse, float scale,
                      int64_t window, float soft_cap) {
  auto q_dims = q.dimensions(), k_dims = k.dimensions();
  auto q_type = TypeOf(q), kv_type = TypeOf(k);
  if (k.element_count() == 0) return Refuse("an empty pool");
  if (!q_type || !kv_type || TypeOf(v) != kv_type || TypeOf(*out) != q_type)
    return Refuse("types");
  if (q_dims.size() != 3 || k_dims.size() != 4 || k_dims != v.dimensions() ||
      k_dims[3] != q_dims[2] || q_dims[1] % k_dims[1] || q_dims != out->dimensions())
    return Refuse("shapes");
  int64_t rows = block_tables.dimensions()[0];
  if (kv_lens.dimensions()[0] != rows || cu_q_lens.dimensions()[0] != rows + 1)
    return Refuse("rows");
  // Else a wrong one would be written through.
  std::vector<int32_t> starts(rows + 1);
  for (int64_t i = 0; i <= rows; ++i)
    starts[i] = std::clamp<int64_t>(cu_q_lens.typed_data()[i], 0, q_dims[0]);
  Attention a = {};
  a.q = q.untyped_data();
  a.q_type = *q_type;
  a.k = k.untyped_data();
  a.v = v.untyped_data();
  a.kv_type = *kv_type;
  a.block_tables = block_tables.typed_data();
  a.kv_lens = kv_lens.typed_data();
  a.cu_q_lens = starts.data();
  a.out = out->untyped_data();
  a.lse = lse->typed_data();
  a.tokens = q_dims[0];
  a.rows = rows;
  a.width = block_tables.dimensions()[1];
  a.num_blocks = k_dims[0];
  a.q_heads = q_dims[1];
  a.kv_heads = k_dims[1];
  a.block_size = k_dims[2];
  a.head_dim = k_dims[3];
  a.scale = scale;
  a.window = window;
  a.soft_cap = soft_cap;
  Attend(a, On(pool));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_multiply, MultiplyImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_normalize, NormalizeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_gate, GateImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_attend, AttendImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntMatrix>()
                                  .Arg<IntVector>()
                                  .Arg<IntVector>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<FloatMatrix>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

#pragma GCC visibility pop

}  // namespace jaxkv

// A second device, so that what is offloaded has somewhere to come from where there is no accelerator. Its addresses are
// moved by an offset: a host that reads one crashes. Every operator runs on the CPU, on copies, which are not counted.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kFar = c10::DeviceType::PrivateUse1;
constexpr uintptr_t kOffset = uintptr_t(1) << 46;
std::atomic<int64_t> live{0}, down{0}, up{0};
thread_local bool computes = false;

void* near_(const void* p) { return p ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) - kOffset) : nullptr; }
void* far_(void* p) { return p ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) + kOffset) : nullptr; }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFar; }
  c10::Device exchangeDevice(c10::Device) const override { return {kFar, 0}; }
  c10::Device getDevice() const override { return {kFar, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void release(void* p) {
  if (!p) return;
  auto* base = static_cast<char*>(near_(p)) - 64;
  live -= *reinterpret_cast<int64_t*>(base);
  std::free(base);
}

struct Alloc final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &release, {kFar, 0}};
    auto* base = static_cast<char*>(std::aligned_alloc(64, (n + 127) / 64 * 64));
    *reinterpret_cast<int64_t*>(base) = n;
    live += n;
    void* p = far_(base + 64);
    return {p, p, &release, {kFar, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(near_(to), near_(from), n); }
};
Alloc alloc;
REGISTER_ALLOCATOR(kFar, &alloc);

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return {kFar, 0}; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = alloc.allocate(n);
    auto old = storage.nbytes();
    if (old && n) std::memcpy(near_(fresh.get()), near_(storage.data()), std::min(old, n));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};
Hooks hooks;

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& x) {
  if (!x.device().is_privateuseone()) return x;
  void* p = x.numel() ? near_(x.data_ptr()) : nullptr;
  auto out = at::from_blob(p, x.sizes(), x.strides(), x.options().device(c10::kCPU));
  if (x.is_conj()) out._set_conj(true);
  if (x.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  bool from = self.device().is_privateuseone(), to = dst.device().is_privateuseone();
  if (from && !to && !computes) down += dst.nbytes();
  if (to && !from && !computes) up += dst.nbytes();
  on_cpu(dst).copy_(on_cpu(self));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes());
  return copy_from(self, dst, false);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Computing {
    bool before = std::exchange(computes, true);
    ~Computing() { computes = before; }
  } computing;
  at::native::cpu_fallback(op, stack);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> o = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), o);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_source(at::Tensor& self, at::Storage src, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, src, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_storage(at::Tensor& self, at::Storage src) { return at::native::set_(self, src); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("unfold", unfold);
}

}  // namespace


extern "C" {
void far_start() { at::RegisterPrivateUse1HooksInterface(&hooks); }
int64_t far_live() { return live; }
int64_t far_up() { return up; }
int64_t far_down() { return down; }
}

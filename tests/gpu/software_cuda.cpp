// A CUDA in software: tensors on cuda:N live in host memory and every kernel is the CPU's, but
// devices, dispatch keys, copies and allocations are as on a GPU. It is for a CPU build of torch,
// which has no CUDA kernels to clash with. To be loaded before `import torch`.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "cuda_guard.h"

namespace {

using namespace stand_in;
using at::Tensor;

std::atomic<long> kernels{0}, bytes_now{0}, bytes_peak{0};

// -- memory ----------------------------------------------------------------------------------------

struct DeviceMemory final : public c10::Allocator {
  struct Block {
    void* address;
    size_t bytes;
  };
  static void drop(void* context) {
    auto* block = static_cast<Block*>(context);
    bytes_now -= block->bytes;
    c10::GetCPUAllocator()->raw_deallocate(block->address);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, current_device()};
    void* address = c10::GetCPUAllocator()->raw_allocate(bytes);
    long now = bytes_now += bytes, peak = bytes_peak;
    while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {
    }
    return {address, new Block{address, bytes}, &drop, current_device()};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_memory)

// Ordinary memory of the host that is known as pinned.
std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned_ranges;

struct PinnedMemory final : public c10::Allocator {
  static void drop(void* address) {
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_ranges.erase(reinterpret_cast<uintptr_t>(address));
    }
    c10::GetCPUAllocator()->raw_deallocate(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, Device(DeviceType::CPU)};
    void* address = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_ranges[reinterpret_cast<uintptr_t>(address)] = bytes;
    return {address, address, &drop, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  auto place = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned_ranges.upper_bound(place);
  if (next == pinned_ranges.begin()) return false;
  --next;
  return place < next->first + next->second;
}

// -- generators: the device's draw as a CPU's ------------------------------------------------------

struct DeviceGenerator final : public c10::GeneratorImpl {
  at::Generator inner;
  DeviceGenerator(DeviceIndex index, at::Generator draws)
      : c10::GeneratorImpl(
            Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(std::move(draws)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    auto kept = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        const_cast<c10::TensorImpl*>(&state));
    inner.set_state(Tensor::wrap_tensor_impl(kept));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.get_state().getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), inner.clone());
  }
};

at::Generator new_generator(DeviceIndex index) {
  return at::Generator(
      c10::make_intrusive<DeviceGenerator>(index, at::detail::createCPUGenerator()));
}

// The name is the key under which torch looks for it.
struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex next) const override { current = next; }
  DeviceIndex exchangeDevice(DeviceIndex next) const override {
    return std::exchange(current, next);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex next) const override {
    return next < 0 ? current : std::exchange(current, next);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Device getDeviceFromPtr(void*) const override { return stand_in::current_device(); }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return new_generator(index < 0 ? current : index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (DeviceIndex i = 0; i < kDevices; ++i) made.push_back(new_generator(i));
      return made;
    }();
    return all.at(index < 0 ? current : index);
  }
};

// -- the same memory as the CPU sees it, and a CPU's result taken over by the device ---------------

Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

c10::Storage retagged(const c10::Storage& storage, Device device, c10::Allocator* allocator) {
  auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr data(const_cast<void*>(storage.data()), new c10::Storage(storage), drop, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

Tensor as_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = retagged(tensor.storage(), Device(DeviceType::CPU), c10::GetCPUAllocator());
  return tensor_on(storage, c10::DispatchKey::CPU, tensor);
}

Tensor as_device(const Tensor& tensor, Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  auto storage = retagged(tensor.storage(), device, &device_memory);
  return tensor_on(storage, c10::DispatchKey::CUDA, tensor);
}

// -- every operator without a kernel below: its CPU kernel on the same memory ----------------------

struct Call {
  std::vector<std::pair<Tensor, Tensor>> seen;  // on the device, on the host
  std::optional<Device> device;
  bool has_host_tensor = false;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor |= tensor.dim() > 0;  // as a GPU's kernels, which take numbers of the host
      return tensor;
    }
    TORCH_CHECK(
        !device || *device == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", tensor.device(), "!");
    device = tensor.device();
    for (auto& [on_device, on_host] : seen)
      if (on_device.is_same(tensor)) return on_host;
    seen.emplace_back(tensor, as_host(tensor));
    return seen.back().second;
  }

  void to_host(c10::IValue& value) {
    if (value.isTensor()) {
      value = to_host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorList()) list.push_back(to_host(one));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> one : value.toOptionalTensorList())
        list.push_back(one ? std::optional<Tensor>(to_host(*one)) : one);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = value.toGenerator().get<DeviceGenerator>()->inner;
    }
  }

  void take_over_resized(Device home) {
    for (auto& [on_device, on_host] : seen) {
      auto* impl = on_device.unsafeGetTensorImpl();
      if (on_host.numel() && on_host.storage().data() != on_device.storage().data())
        impl->set_storage_keep_dtype(retagged(on_host.storage(), home, &device_memory));
      if (on_host.sizes() != on_device.sizes() || on_host.strides() != on_device.strides())
        impl->set_sizes_and_strides(
            on_host.sizes(), on_host.strides(), on_host.storage_offset());
    }
  }

  Tensor to_device(const Tensor& tensor, Device home) {
    if (!tensor.defined()) return tensor;
    for (auto& [on_device, on_host] : seen)
      if (on_host.is_same(tensor)) return on_device;
    for (auto& [on_device, on_host] : seen)
      if (on_host.storage().is_alias_of(tensor.storage()))
        return tensor_on(on_device.storage(), c10::DispatchKey::CUDA, tensor);
    return as_device(tensor, home);
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  kernels++;
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  Call call;
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i)
    call.to_host((*stack)[i]);
  // As on a GPU: indices may be on the host, nothing else with a shape.
  const bool may_mix = schema.name().rfind("aten::index", 0) == 0 ||
      schema.name().rfind("aten::_index_put", 0) == 0;
  TORCH_CHECK(
      may_mix || !call.device || !call.has_host_tensor,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      call.device.value_or(current_device()), " and cpu! (", schema.name(), ")");
  op.callBoxed(stack);
  const Device home = call.device.value_or(current_device());
  call.take_over_resized(home);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor(), home);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorList()) list.push_back(call.to_device(one, home));
      value = list;
    }
  }
}

// -- the few operators a device has to have itself -------------------------------------------------

Device or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : current_device();
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  as_host(self).copy_(as_host(source), non_blocking);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return as_host(self).item();
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  at::AutoDispatchBelowADInplaceOrView below;
  return tensor_on(self.storage(), c10::DispatchKey::CUDA, as_host(self).view_symint(size));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto strided = as_host(self).as_strided_symint(size, stride, offset);
  return tensor_on(self.storage(), c10::DispatchKey::CUDA, strided);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}

void resize_storage(Tensor self, int64_t bytes) {
  auto storage = self.storage();
  c10::DeviceGuard guard(self.device());
  auto data = device_memory.allocate(bytes);
  if (bytes && storage.nbytes())
    memcpy(data.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(
    const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self, needed);
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto start = offset.guard_int(__FILE__, __LINE__);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), start);
  } else {
    impl->set_storage_offset(start);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t elements = storage.nbytes() / self.itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({elements});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

bool is_set_to(const Tensor& one, const Tensor& other) {
  return one.storage().is_alias_of(other.storage()) && one.sizes() == other.sizes() &&
      one.strides() == other.strides() && one.storage_offset() == other.storage_offset();
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("is_set_to", &is_set_to);
}

TORCH_LIBRARY(software_cuda, library) {
  library.def("host(Tensor(a) tensor) -> Tensor(a)", [](const Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below;
    return as_host(tensor);
  });
  // Torch's own storages refuse this without a CUDA build.
  library.def("resize_storage(Tensor(a!) tensor, int bytes) -> ()", &resize_storage);
  library.def("counts() -> int[]", []() {
    return std::vector<int64_t>{kernels, bytes_now, bytes_peak};
  });
}

// A CUDA without memory or kernels: enough for a CPU build of torch to take fake tensors
// (FakeTensorMode) on cuda:N through autograd. To be loaded before `import torch`.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <vector>

#include "cuda_guard.h"

namespace {

using namespace stand_in;

// Claims to be the GPU's generator; nothing is drawn from it for tensors that hold no numbers.
struct Generator : public at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(DeviceType::CUDA, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

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
  DeviceIndex exchangeDevice(DeviceIndex next) const override { return std::exchange(current, next); }
  DeviceIndex maybeExchangeDevice(DeviceIndex next) const override {
    return next < 0 ? current : std::exchange(current, next);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (DeviceIndex i = 0; i < kDevices; ++i) made.push_back(at::make_generator<Generator>(i));
      return made;
    }();
    return all.at(index < 0 ? current : index);
  }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

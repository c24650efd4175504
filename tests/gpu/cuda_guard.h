// What a CPU build of torch lacks before it accepts tensors on `cuda`: a device guard. Nothing is
// asynchronous here, so streams and events are done as soon as they are asked about.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace stand_in {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 8;
inline thread_local DeviceIndex current = 0;

inline Device current_device() {
  return {DeviceType::CUDA, current};
}

struct CudaGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device next) const override {
    Device before = current_device();
    current = next.index();
    return before;
  }
  Device getDevice() const override { return current_device(); }
  void setDevice(Device next) const override { current = next.index(); }
  void uncheckedSetDevice(Device next) const noexcept override { current = next.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream exchangeStream(Stream next) const override {
    return Stream(Stream::DEFAULT, next.device());
  }
  bool queryStream(const Stream&) const override { return true; }
  bool isStreamCapturing(const Stream&) const override { return false; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

}  // namespace stand_in

namespace {
using stand_in::CudaGuard;
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
}  // namespace

// nccl's place for `software_cuda`: a process group for cuda tensors that gives their memory to
// another one, gloo's.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using at::Tensor;
using Handle = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

Tensor host(const Tensor& tensor) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("software_cuda::host", "")
                       .typed<Tensor(const Tensor&)>();
  return op.call(tensor);
}

template <typename T>
std::vector<T> host(const std::vector<T>& given) {
  std::vector<T> made;
  for (auto& one : given) made.push_back(host(one));
  return made;
}

struct SoftwareNccl : public c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;

  explicit SoftwareNccl(c10::intrusive_ptr<c10d::Backend> backend)
      : c10d::Backend(backend->getRank(), backend->getSize()), inner(std::move(backend)) {}

  const std::string getBackendName() const override { return "software_nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  Handle broadcast(Tensors& given, const c10d::BroadcastOptions& options) override {
    auto tensors = host(given);
    return inner->broadcast(tensors, options);
  }
  Handle allreduce(Tensors& given, const c10d::AllreduceOptions& options) override {
    auto tensors = host(given);
    return inner->allreduce(tensors, options);
  }
  Handle allreduce_coalesced(
      Tensors& given, const c10d::AllreduceCoalescedOptions& options) override {
    auto tensors = host(given);
    return inner->allreduce_coalesced(tensors, options);
  }
  Handle reduce(Tensors& given, const c10d::ReduceOptions& options) override {
    auto tensors = host(given);
    return inner->reduce(tensors, options);
  }
  Handle allgather(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = host(to);
    auto inputs = host(from);
    return inner->allgather(outputs, inputs, options);
  }
  Handle _allgather_base(
      Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
    auto output = host(to), input = host(from);
    return inner->_allgather_base(output, input, options);
  }
  Handle allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = host(to), inputs = host(from);
    return inner->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Handle reduce_scatter(
      Tensors& to, std::vector<Tensors>& from,
      const c10d::ReduceScatterOptions& options) override {
    auto outputs = host(to);
    auto inputs = host(from);
    return inner->reduce_scatter(outputs, inputs, options);
  }
  Handle _reduce_scatter_base(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto output = host(to), input = host(from);
    return inner->_reduce_scatter_base(output, input, options);
  }
  Handle reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    auto outputs = host(to), inputs = host(from);
    return inner->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Handle alltoall_base(
      Tensor& to, Tensor& from, std::vector<int64_t>& arriving, std::vector<int64_t>& leaving,
      const c10d::AllToAllOptions& options) override {
    auto output = host(to), input = host(from);
    return inner->alltoall_base(output, input, arriving, leaving, options);
  }
  Handle send(Tensors& given, int to, int tag) override {
    auto tensors = host(given);
    return inner->send(tensors, to, tag);
  }
  Handle recv(Tensors& given, int from, int tag) override {
    auto tensors = host(given);
    return inner->recv(tensors, from, tag);
  }
  Handle barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return inner->barrier(plain);
  }
};

}  // namespace

PYBIND11_MODULE(software_nccl, module) {
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  module.def("around", [](Backend inner) -> Backend {
    return c10::make_intrusive<SoftwareNccl>(std::move(inner));
  });
}

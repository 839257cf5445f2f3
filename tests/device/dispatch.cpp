// A fake CUDA device for a CPU build of torch: each op runs the CPU's kernel on the same bytes, is counted, and refuses
// what CUDA refuses: tensors of two devices, the host's generator for a device's draw.
#include "fake_cuda.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>
#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using namespace fake_cuda;

namespace {

// Ops that take tensors of the host and of a device together.
const std::set<std::string> MAY_MIX = {"aten::copy_",  "aten::_foreach_copy_",    "aten::index",
                                       "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_", "aten::_unsafe_index_put"};
// Ops that do not take the host's tensor even where it is a single number.
const std::set<std::string> NO_HOST_NUMBERS = {"aten::cat",          "aten::stack",      "aten::equal",
                                               "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adam_"};
// Ops after which the host knows something of the device's numbers.
const std::set<std::string> WAITING = {"aten::_local_scalar_dense", "aten::equal",          "aten::nonzero",
                                       "aten::masked_select",       "aten::_unique2",       "aten::unique_dim",
                                       "aten::unique_consecutive",  "aten::bincount",       "aten::_linalg_eigh",
                                       "aten::_linalg_svd",         "aten::repeat_interleave"};

bool is_device(const Tensor& t) { return t.defined() && t.device().is_cuda(); }

Tensor with_storage(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

// The same bytes, said to be the host's.
Tensor host_view(const Tensor& t) {
  c10::Storage own = t.storage();
  c10::DataPtr bytes(own.mutable_data(), nullptr, [](void*) {}, Device(DeviceType::CPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
  auto made = with_storage(std::move(same), c10::DispatchKey::CPU, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

c10::Storage device_storage(const void* bytes, size_t nbytes, DeviceIndex index) {
  c10::Storage made(c10::Storage::use_byte_size_t(), nbytes, allocate(nbytes, index), allocator(), true);
  if (nbytes && bytes) std::memcpy(made.mutable_data(), bytes, nbytes);
  return made;
}

// A kernel's result, which is the device's and not a copy to it.
Tensor as_device(const Tensor& t, DeviceIndex index) {
  return with_storage(device_storage(t.storage().data(), t.storage().nbytes(), index), c10::DispatchKey::CUDA, t);
}

void swap_memory(const c10::Storage& storage, const void* bytes, size_t copied, size_t nbytes, DeviceIndex index) {
  auto fresh = allocate(nbytes, index);
  if (copied) std::memcpy(fresh.get(), bytes, copied);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

// As torch's copy_kernel_cuda: a copy that may block converts on the host, another one on the device; the host goes on
// at once only where it need not block and its memory is pinned.
void count_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return;
  if (is_device(to) && is_device(from)) {
    if (to.device() != from.device()) counts[to.device().index()][BETWEEN]++;
    return;
  }
  if (!is_device(to) && !is_device(from)) return;
  bool up = is_device(to);
  const Tensor &there = up ? to : from, &here = up ? from : to;
  auto& own = counts[there.device().index()];
  own[up ? TO_DEVICE : TO_HOST]++;
  own[up ? TO_DEVICE_BYTES : TO_HOST_BYTES] += to.numel() * (non_blocking ? here : there).itemsize();
  if (!(non_blocking && is_pinned(here.storage().data()))) own[WAITS]++;
}

void refuse(const c10::OperatorHandle& op, const std::string& one, const std::string& other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "! (", op.schema().operator_name(), ")");
}

void refuse_mixed(const c10::OperatorHandle& op, const std::vector<Tensor>& together) {
  const auto& name = op.schema().name();
  std::optional<Device> there;
  for (auto& t : together) {
    if (!is_device(t)) continue;
    if (there && t.device() != *there) refuse(op, there->str(), t.device().str());
    there = t.device();
  }
  if (!there) return;
  for (auto& t : together)
    if (t.defined() && t.device().is_cpu() && (t.dim() > 0 || NO_HOST_NUMBERS.count(name))) refuse(op, there->str(), "cpu");
}

// Indices of the host are copied to the device; masks are counted there first, for which the host waits. For
// aten::index torch has done so before, by ops of their own.
void check_index(const std::string& name, const std::vector<Tensor>& all) {
  TORCH_CHECK(is_device(all[0]), "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
  if (name == "aten::index") return;
  auto& own = counts[all[0].device().index()];
  for (size_t i = 1; i < all.size(); i++) {
    const auto& t = all[i];
    if (!t.defined()) continue;
    if (t.device().is_cpu() && t.dim() > 0) {
      own[TO_DEVICE]++;
      own[TO_DEVICE_BYTES] += t.nbytes();
      own[WAITS]++;
    }
    if (t.scalar_type() == at::kBool && all[0].scalar_type() != at::kBool) own[WAITS]++;
  }
}

// The device's tensors among an op's arguments, and the host's in their place.
struct Arguments {
  std::vector<Tensor> all;
  std::vector<std::vector<Tensor>> lists;
  std::vector<std::pair<Tensor, Tensor>> views;                         // (host's, device's)
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;         // host's -> device's
  std::unordered_map<c10::TensorImpl*, Tensor> originals;               // host's -> device's
  DeviceIndex index = -1;
  bool asked_host = false, draws_by_own = false;

  Tensor take(const Tensor& t) {
    all.push_back(t);
    if (!is_device(t)) return t;
    if (index < 0) index = t.device().index();
    auto made = host_view(t);
    storages[made.storage().unsafeGetStorageImpl()] = t.storage();
    originals[made.unsafeGetTensorImpl()] = t;
    views.emplace_back(made, t);
    return made;
  }

  c10::IValue take(const c10::IValue& value, const std::string& type) {
    if (value.isTensor()) return take(value.toTensor());
    if (value.isTensorList()) {
      lists.push_back(value.toTensorVector());
      std::vector<Tensor> made;
      for (auto& t : lists.back()) made.push_back(take(t));
      return made;
    }
    if (value.isList() && type.find("Tensor?") != std::string::npos) {
      c10::List<std::optional<Tensor>> made;
      auto given = value.toList();
      for (size_t k = 0; k < given.size(); k++) {
        c10::IValue one = given.get(k);
        made.push_back(one.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(take(one.toTensor())));
      }
      return made;
    }
    if (value.isDevice()) {
      auto device = value.toDevice();
      asked_host = !device.is_cuda();
      if (asked_host) return value;
      index = checked(device.index());
      return Device(DeviceType::CPU);
    }
    if (type.find("Generator") != std::string::npos) {
      draws_by_own = true;
      auto at = index < 0 ? current : index;
      return drawing(value.isNone() ? default_generator(at) : value.toGenerator());
    }
    return value;
  }

  // A result of the CPU's kernel as the device's.
  Tensor back(const Tensor& t) const {
    if (!t.defined() || !t.device().is_cpu()) return t;
    if (auto same = originals.find(t.unsafeGetTensorImpl()); same != originals.end()) return same->second;
    for (auto& one : all)
      if (one.defined() && one.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return t;
    if (auto shared = storages.find(t.storage().unsafeGetStorageImpl()); shared != storages.end())
      return with_storage(shared->second, c10::DispatchKey::CUDA, t);
    return asked_host ? t : as_device(t, index < 0 ? current : index);
  }

  // Arguments that the kernel gave another size: an `out`.
  void resized() const {
    for (auto& [host, own] : views) {
      if (host.storage().data() != own.storage().data()) {
        auto nbytes = host.storage().nbytes();
        swap_memory(own.storage(), host.storage().data(), nbytes, nbytes, own.device().index());
      }
      if (own.sizes() != host.sizes() || own.strides() != host.strides())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  void check(const c10::OperatorHandle& op) const {
    const auto& name = op.schema().name();
    if (name == "aten::_foreach_copy_") {  // torch takes the slow way where devices differ: one copy after the other
      bool non_blocking = false;
      for (size_t i = 0; i < lists[0].size(); i++) count_copy(lists[0][i], lists[1][i], non_blocking);
    } else if (name.rfind("aten::_foreach_", 0) == 0) {
      for (size_t i = 0; !lists.empty() && i < lists[0].size(); i++) {
        std::vector<Tensor> together;
        for (auto& list : lists)
          if (i < list.size()) together.push_back(list[i]);
        refuse_mixed(op, together);
      }
    } else if (!MAY_MIX.count(name)) {
      refuse_mixed(op, all);
    } else if (all.size() > 1) {
      check_index(name, all);
    }
  }
};

bool is_tagged_as_drawing(const c10::OperatorHandle& op) {
  auto tags = op.getTags();
  return std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Arguments arguments;
  auto first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[first + i];
    value = arguments.take(value, schema.arguments()[i].type()->str());
  }
  auto index = checked(arguments.index);
  counts[index][KERNELS]++;
  if (WAITING.count(schema.name())) counts[index][WAITS]++;
  arguments.check(op);
  // Ops that draw without a generator among their arguments (dropout) take the host's default one.
  auto host = at::detail::getDefaultCPUGenerator();
  std::optional<Tensor> before;
  auto own = drawing(default_generator(index));
  if (is_tagged_as_drawing(op) && !arguments.draws_by_own) {
    before = host.get_state();
    host.set_state(own.get_state());
  }
  op.callBoxed(stack);
  if (before) {
    own.set_state(host.get_state());
    host.set_state(*before);
  }
  arguments.resized();
  auto results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = arguments.back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (auto& t : value.toTensorVector()) made.push_back(arguments.back(t));
      value = made;
    }
  }
}

// Ops that make or reshape storage have no CPU kernel that could stand for the device's.

struct OnDevice {
  DeviceIndex before = current;
  explicit OnDevice(std::optional<Device> device) { current = checked(device ? device->index() : -1); }
  ~OnDevice() { current = before; }
};

at::ScalarType given_or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool> pin,
                           std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(device);
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return Tensor(at::detail::empty_generic(size, allocator(), keys, given_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(device);
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return Tensor(at::detail::empty_strided_generic(size, stride, allocator(), keys, given_or_default(dtype)));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  counts[(is_device(self) ? self : source).device().index()][KERNELS]++;
  count_copy(self, source, non_blocking);
  auto to = is_device(self) ? host_view(self) : self;
  to.copy_(is_device(source) ? host_view(source) : source);
  return self;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t wanted = self.itemsize() * self.storage_offset();
  wanted += self.itemsize() * c10::multiply_integers(size);
  auto storage = self.storage();
  if (storage.nbytes() < wanted) swap_memory(storage, storage.data(), storage.nbytes(), wanted, self.device().index());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(offset.value_or(self.storage_offset()));
  impl->set_sizes_and_strides(size, stride);
  return made;
}

Tensor& set_source(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source(self, std::move(source), 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) { return set_source(self, device_storage(nullptr, 0, self.device().index()), 0, {0}, {}); }

void record_stream(Tensor&, c10::Stream) {}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the formula written out, of ops that run here
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());  // composite otherwise
}

}  // namespace

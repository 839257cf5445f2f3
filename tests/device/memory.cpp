// A fake CUDA device for a CPU build of torch: its memory is the host's, its streams are over at once.
//
// This file is what torch asks of a machine: memory, pinned memory, generators, streams. dispatch.cpp is its ops.
#include "fake_cuda.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

namespace fake_cuda {

std::atomic<int> devices{1};
std::atomic<int64_t> counts[MAX_DEVICES][COUNTS];
std::atomic<int64_t> pinned_bytes{0};
thread_local DeviceIndex current = 0;

DeviceIndex checked(DeviceIndex index) {
  if (index < 0) index = current;
  TORCH_CHECK(index < devices, "CUDA error: invalid device ordinal");
  return index;
}

namespace {

constexpr size_t HEAD = 64;           // before each block, aligned as alloc_cpu aligns
constexpr size_t POISONED = 1 << 16;  // bytes of each block that begin as NaN

struct Head {
  size_t nbytes;
  DeviceIndex index;
};

void give_back(void* context) {
  auto* head = static_cast<Head*>(context);
  counts[head->index][ALLOCATED] -= head->nbytes;
  c10::free_cpu(head);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override { return fake_cuda::allocate(nbytes, current); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
DeviceAllocator device_allocator;

std::mutex pinning;
std::map<uintptr_t, size_t> pinned;  // first byte -> bytes, as torch's caching host allocator rounds them

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* context) {
    std::lock_guard<std::mutex> lock(pinning);
    auto found = pinned.find(reinterpret_cast<uintptr_t>(context));
    if (found != pinned.end()) {
      pinned_bytes -= found->second;
      pinned.erase(found);
    }
    c10::free_cpu(context);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    auto rounded = std::bit_ceil(std::max<size_t>(nbytes, 1));
    auto* block = c10::alloc_cpu(rounded);
    std::lock_guard<std::mutex> lock(pinning);
    pinned[reinterpret_cast<uintptr_t>(block)] = rounded;
    pinned_bytes += rounded;
    return {block, block, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
PinnedAllocator pinned_allocator;

// A device's generator: said to be of the device, draws by a CPU's.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;
  DeviceGenerator(DeviceIndex index, at::Generator from)
      : GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(from)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }
};

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index, at::make_generator<at::CPUGeneratorImpl>());
}

at::Generator default_generators[MAX_DEVICES];  // torch.cuda.default_generators

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(checked(index)); }
  void deviceSynchronize(DeviceIndex index) const override { counts[checked(index)][WAITS]++; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, checked(device.index())), 0);
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int over;
    *event = &over;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { counts[stream.device_index()][WAITS]++; }
  void synchronizeEvent(void*) const override { counts[current][WAITS]++; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());

}  // namespace

c10::Allocator* allocator() { return &device_allocator; }

c10::DataPtr allocate(size_t nbytes, DeviceIndex index) {
  auto* head = static_cast<Head*>(c10::alloc_cpu(nbytes + HEAD));
  *head = {nbytes, index};
  int64_t now = counts[index][ALLOCATED] += nbytes;
  int64_t peak = counts[index][PEAK];
  while (now > peak && !counts[index][PEAK].compare_exchange_weak(peak, now)) {
  }
  auto* data = reinterpret_cast<char*>(head) + HEAD;
  std::memset(data, 0xFF, std::min(nbytes, POISONED));  // NaN: what is read before it was written is seen
  return {data, head, &give_back, Device(DeviceType::CUDA, index)};
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinning);
  auto at = reinterpret_cast<uintptr_t>(data);
  auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

const at::Generator& default_generator(DeviceIndex index) { return default_generators[checked(index)]; }

at::Generator drawing(const at::Generator& own) {
  TORCH_CHECK(own.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", own.device().type(), "'");
  return static_cast<DeviceGenerator*>(own.unsafeGetGeneratorImpl())->host;
}

}  // namespace fake_cuda

namespace at {
using FakeHooks = ::fake_cuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
}  // namespace at

// For fake_cuda.py, through ctypes.
extern "C" {
void fake_devices(int number) { fake_cuda::devices = number; }
int fake_current() { return fake_cuda::current; }
void fake_set_current(int index) { fake_cuda::current = fake_cuda::checked(index); }
int64_t fake_count(int index, int which) { return fake_cuda::counts[index][which]; }
int64_t fake_pinned_bytes() { return fake_cuda::pinned_bytes; }
void fake_wait(int index) { fake_cuda::counts[index][fake_cuda::WAITS]++; }
void fake_reset_peak(int index) { fake_cuda::counts[index][fake_cuda::PEAK] = fake_cuda::counts[index][fake_cuda::ALLOCATED].load(); }
void fake_default_generator(int index, c10::GeneratorImpl* impl) {
  fake_cuda::default_generators[index] = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(impl));
}
// Python's own resize_ of a storage knows no allocator of ours.
void fake_resize(void* storage, size_t nbytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  auto fresh = fake_cuda::allocate(nbytes, impl->device().index());
  std::memcpy(fresh.get(), impl->data(), std::min<size_t>(nbytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(nbytes);
}
}

// What memory.cpp and dispatch.cpp share: counters, the current device, memory and generators of a GPU that is not there.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <atomic>
#include <cstdint>

namespace fake_cuda {

constexpr int MAX_DEVICES = 16;

// In the order of `COUNTS` in fake_cuda.py.
enum Count {
  KERNELS,         // ops that ran on the device, views among them
  WAITS,           // times that the host waited for the device
  TO_HOST,         // copies
  TO_HOST_BYTES,
  TO_DEVICE,
  TO_DEVICE_BYTES,
  BETWEEN,         // copies from another device to this one
  ALLOCATED,       // bytes now
  PEAK,            // bytes, the most since the last reset
  COUNTS
};

extern std::atomic<int> devices;
extern std::atomic<int64_t> counts[MAX_DEVICES][COUNTS];
extern std::atomic<int64_t> pinned_bytes;
extern thread_local c10::DeviceIndex current;

c10::DeviceIndex checked(c10::DeviceIndex index);  // the current device for -1
c10::Allocator* allocator();
c10::DataPtr allocate(size_t nbytes, c10::DeviceIndex index);
bool is_pinned(const void* data);
const at::Generator& default_generator(c10::DeviceIndex index);
// The CPU generator that draws for one of a device. Refuses a generator of another kind of device, as CUDA does.
at::Generator drawing(const at::Generator& own);

}  // namespace fake_cuda

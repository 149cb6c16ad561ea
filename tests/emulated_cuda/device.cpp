// The emulated devices: see __init__.py. Kernels run at once, on the CPU, on the devices' own memory, which is the
// host's; vector clocks tell what a real device could run at the same time.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IntArrayRef;
using c10::Stream;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::CUDA;
constexpr int kDevices = 4;
constexpr size_t kRounding = 512;
constexpr int64_t kCapacity = 16LL << 30;
constexpr int kPooledStreams = 32;

// ---------------------------------------------------------------------------------------------------------- clocks

using Clock = std::map<int, uint64_t>;  // how far each stream is known to have come, by its number

std::recursive_mutex everything;
std::map<std::pair<int, int64_t>, int> numbers;  // of streams, by device and id
std::vector<std::string> names;
std::vector<Clock> clocks;
Clock host;  // what the host has waited for
std::vector<std::string> found_races;
std::vector<std::string> seen_synchronizations;
bool refuse_synchronizations = false;
std::array<int64_t, kDevices> streams_made{};
bool is_capturing = false;

thread_local int current_device = 0;
thread_local std::array<int64_t, kDevices> current_stream{};

using Locked = std::lock_guard<std::recursive_mutex>;

void join(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}

int number_of(int device, int64_t id) {
  auto [place, is_new] = numbers.try_emplace({device, id}, static_cast<int>(clocks.size()));
  if (is_new) {
    clocks.emplace_back();
    names.push_back("stream " + std::to_string(id) + " of cuda:" + std::to_string(device));
  }
  return place->second;
}

int number_of(const Stream& stream) { return number_of(stream.device_index(), stream.id()); }

int current_number(int device) { return number_of(device, current_stream[device]); }

// An operation is issued on the current stream of a device, after all that the host has waited for.
int issue(int device) {
  int stream = current_number(device);
  join(clocks[stream], host);
  clocks[stream][stream]++;
  return stream;
}

bool has_happened(int stream, uint64_t time, int for_stream) {
  if (stream == for_stream) return true;
  auto known = clocks[for_stream].find(stream);
  return known != clocks[for_stream].end() && known->second >= time;
}

// Copies to the host that nobody has waited for yet: until then the host reads something else.
struct Landing {
  int stream;
  uint64_t time;
  at::Tensor target, copied;
};
std::vector<Landing> on_their_way;

// Targets of copies that have landed. They are let go where nothing is locked: to free memory that belongs to Python
// takes the interpreter's lock.
std::vector<at::Tensor> landed_targets;

std::vector<at::Tensor> taken_targets() {
  Locked locked(everything);
  return std::exchange(landed_targets, {});
}

// Copies from the host that nobody has waited for yet: until then they read its memory, which is not kept alive.
struct Departure {
  int stream;
  uint64_t time;
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  const char *begin, *end;
};
std::vector<Departure> departing;

const char* begin_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
const char* end_of(const at::Tensor& tensor) { return begin_of(tensor) + tensor.nbytes(); }

bool overlap(const at::Tensor& one, const char* begin, const char* end) {
  return begin_of(one) < end && begin < end_of(one);
}

// The same tensor, without an object in Python.
at::Tensor of_its_own(const at::Tensor& tensor) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

void host_knows(const Clock& clock) {
  join(host, clock);
  auto landed = [](const Landing& one) {
    auto known = host.find(one.stream);
    return known != host.end() && known->second >= one.time;
  };
  for (auto& one : on_their_way)
    if (landed(one)) {
      std::memcpy(one.target.mutable_data_ptr(), one.copied.const_data_ptr(), one.target.nbytes());
      landed_targets.push_back(one.target);
    }
  on_their_way.erase(std::remove_if(on_their_way.begin(), on_their_way.end(), landed), on_their_way.end());
  auto left = [](const Departure& one) {
    auto known = host.find(one.stream);
    return one.memory.expired() || (known != host.end() && known->second >= one.time);
  };
  departing.erase(std::remove_if(departing.begin(), departing.end(), left), departing.end());
}

bool host_has_waited_for(const Clock& clock) {
  return std::all_of(clock.begin(), clock.end(), [](auto& one) {
    auto known = host.find(one.first);
    return known != host.end() && known->second >= one.second;
  });
}

void refuse_in_capture() { TORCH_CHECK(!is_capturing, "CUDA error: operation not permitted when stream is capturing"); }

void host_waits(int stream, const std::string& for_what) {
  refuse_in_capture();
  seen_synchronizations.push_back(for_what);
  TORCH_CHECK(!refuse_synchronizations, "called a synchronizing CUDA operation: ", for_what);
  host_knows(clocks[stream]);
}

// ---------------------------------------------------------------------------------------------------------- memory

// The caching allocator's book-keeping. A request takes the smallest free chunk that it fits into on its stream; what is
// left over is split off, but not from a large chunk if it is 1 MiB or less: the counters then count the whole chunk.
struct Chunk {
  int64_t segment;
  size_t offset;
  size_t size;
  bool is_free = true;
};

struct Pool {
  std::map<std::pair<int64_t, size_t>, Chunk> chunks;                 // by segment and offset
  std::set<std::tuple<size_t, int64_t, size_t>> free_chunks;          // by size, then place
  std::vector<size_t> segments;  // their sizes

  void add(const Chunk& chunk) {
    chunks[{chunk.segment, chunk.offset}] = chunk;
    if (chunk.is_free) free_chunks.insert({chunk.size, chunk.segment, chunk.offset});
  }
  void take_out(const Chunk& chunk) {
    free_chunks.erase({chunk.size, chunk.segment, chunk.offset});
    chunks.erase({chunk.segment, chunk.offset});
  }
};

constexpr size_t kMiB = 1 << 20;
std::map<std::pair<int, bool>, Pool> pools;  // by stream, and whether for small requests

struct Counter {
  int64_t now = 0;
  int64_t peak = 0;

  void add(int64_t bytes) {
    now += bytes;
    peak = std::max(peak, now);
  }
};

// Bytes of a device: handed out; those, and what is freed while another stream may still use it; taken from the device.
struct Counters {
  Counter allocated, active, reserved;
};

std::array<Counters, kDevices> counters;

// Freed memory that the allocator was told of other streams for: it is not handed out before the host has found out
// that they are done with it. That it polls their events is not emulated: a host can always run ahead of a device.
struct Pending {
  int device, owner;
  bool is_small;
  Chunk chunk;
  Clock uses;
};
std::vector<Pending> pending;

void give_back(int stream, bool is_small, Chunk chunk);
void release_unused(int device);

void release_pending(bool wait_for_all = false) {
  auto is_done = [&](const Pending& one) { return wait_for_all || host_has_waited_for(one.uses); };
  for (auto& one : pending)
    if (is_done(one)) {
      counters[one.device].active.add(-static_cast<int64_t>(one.chunk.size));
      give_back(one.owner, one.is_small, one.chunk);
    }
  pending.erase(std::remove_if(pending.begin(), pending.end(), is_done), pending.end());
}

Chunk taken_chunk(int device, int stream, size_t size) {
  bool is_small = size <= kMiB;
  release_pending();
  auto& pool = pools[{stream, is_small}];
  auto fits = pool.free_chunks.lower_bound({size, -1, 0});
  if (fits == pool.free_chunks.end()) {
    size_t segment = is_small ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : (size + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    auto& reserved = counters[device].reserved;
    if (reserved.now + static_cast<int64_t>(segment) > kCapacity) {
      release_pending(true);
      release_unused(device);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, reserved.now + static_cast<int64_t>(segment) <= kCapacity, "CUDA out of memory: ", size);
    reserved.add(static_cast<int64_t>(segment));
    pool.segments.push_back(segment);
    pool.add({static_cast<int64_t>(pool.segments.size()) - 1, 0, segment});
    fits = pool.free_chunks.lower_bound({size, -1, 0});
  }
  Chunk chunk = pool.chunks.at({std::get<1>(*fits), std::get<2>(*fits)});
  pool.take_out(chunk);
  size_t left = chunk.size - size;
  if (is_small ? left >= kRounding : left > kMiB) {
    pool.add({chunk.segment, chunk.offset + size, left});
    chunk.size = size;
  }
  chunk.is_free = false;
  pool.add(chunk);
  return chunk;
}

void give_back(int stream, bool is_small, Chunk chunk) {
  auto& pool = pools[{stream, is_small}];
  pool.chunks.erase({chunk.segment, chunk.offset});
  auto next = pool.chunks.find({chunk.segment, chunk.offset + chunk.size});
  if (next != pool.chunks.end() && next->second.is_free) {
    chunk.size += next->second.size;
    pool.take_out(Chunk(next->second));
  }
  auto before = pool.chunks.lower_bound({chunk.segment, chunk.offset});
  if (before != pool.chunks.begin() && (--before)->second.is_free && before->first.first == chunk.segment) {
    Chunk merged = before->second;
    pool.take_out(merged);
    merged.size += chunk.size;
    chunk = merged;
  }
  chunk.is_free = true;
  pool.add(chunk);
}

std::vector<int> devices_of_streams() {
  std::vector<int> devices(clocks.size());
  for (auto& [place, number] : numbers) devices[number] = place.first;
  return devices;
}

// Segments of which nothing is in use go back to the device.
void release_unused(int device) {
  auto devices = devices_of_streams();
  for (auto& [key, pool] : pools) {
    if (devices[key.first] != device) continue;
    std::map<int64_t, int> parts;
    for (auto& [place, chunk] : pool.chunks) parts[place.first]++;
    std::vector<Chunk> unused;
    for (auto& [place, chunk] : pool.chunks)
      if (chunk.is_free && parts[place.first] == 1) unused.push_back(chunk);
    for (auto& chunk : unused) {
      pool.take_out(chunk);
      counters[device].reserved.add(-static_cast<int64_t>(chunk.size));
    }
  }
}

void empty_cache() {
  Locked locked(everything);
  release_pending(true);
  for (int device = 0; device < kDevices; device++) release_unused(device);
}

// Segments as torch.cuda.memory_snapshot has them: device, stream, whether small, size, and (offset, size, is free) of
// its blocks.
using Snapshot = std::vector<std::tuple<int, int64_t, bool, size_t, std::vector<std::tuple<size_t, size_t, bool>>>>;

Snapshot snapshot() {
  Locked locked(everything);
  release_pending();
  Snapshot segments;
  for (auto& [place, number] : numbers)
    for (bool is_small : {true, false}) {
      auto pool = pools.find({number, is_small});
      if (pool == pools.end()) continue;
      std::map<int64_t, std::vector<std::tuple<size_t, size_t, bool>>> blocks;
      for (auto& [at, chunk] : pool->second.chunks) blocks[at.first].emplace_back(chunk.offset, chunk.size, chunk.is_free);
      for (auto& [segment, of_segment] : blocks)
        segments.emplace_back(place.first, place.second, is_small, pool->second.segments[segment], of_segment);
    }
  return segments;
}

struct Use {
  uint64_t time = 0;
  std::string by;
};

struct Block {
  void* data;
  size_t bytes;  // as the counters count them
  Chunk chunk;
  bool is_small;
  int device;
  int owner;  // the stream that was current when it was made: the allocator hands it out again on that one
  int writer;
  Use written;
  std::map<int, Use> reads;  // since then, by stream
  std::set<int> recorded;    // streams that the allocator was told of
};

std::map<int, std::map<int, Use>> freed;  // by owner: uses, by stream, of what was freed and not handed out again

void report_memory(const Block& block, int64_t change) {
  auto total = static_cast<size_t>(counters[block.device].allocated.now);
  auto reserved = static_cast<size_t>(counters[block.device].reserved.now);
  c10::reportMemoryUsageToProfiler(block.data, change, total, reserved, Device(kType, block.device));
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return allocated(size, size); }

  // Of memory that no kernel here reads or writes, as many bytes are there as are ``backed``.
  static c10::DataPtr allocated(size_t size, size_t backed) {
    Locked locked(everything);
    int device = current_device;
    if (size == 0) return {nullptr, nullptr, &gone, Device(kType, device)};
    size_t rounded = (size + kRounding - 1) / kRounding * kRounding;
    int owner = current_number(device);
    join(clocks[owner], host);
    for (auto& [stream, use] : freed[owner])
      if (!has_happened(stream, use.time, owner))
        found_races.push_back("memory is handed out on " + names[owner] + " that " + names[stream] + " may still use: " + use.by);
    freed[owner].clear();
    auto chunk = taken_chunk(device, owner, rounded);
    backed = (backed + kRounding - 1) / kRounding * kRounding;
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, backed) == 0, "no memory left on the host");
    std::memset(data, 0xff, backed);  // not a number
    size_t bytes = chunk.size;
    auto* block = new Block{data, bytes, chunk, rounded <= kMiB, device, owner, owner, {clocks[owner][owner], "its allocation"}};
    counters[device].allocated.add(static_cast<int64_t>(bytes));
    counters[device].active.add(static_cast<int64_t>(bytes));
    report_memory(*block, static_cast<int64_t>(bytes));
    return {data, block, &gone, Device(kType, device)};
  }

  static void gone(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block == nullptr) return;
    {
      Locked locked(everything);
      note_freed(*block, block->writer, block->written);
      for (auto& [stream, use] : block->reads) note_freed(*block, stream, use);
      auto bytes = static_cast<int64_t>(block->bytes);
      Clock uses;
      for (int stream : block->recorded)
        if (stream != block->owner) uses[stream] = clocks[stream][stream];
      counters[block->device].allocated.add(-bytes);
      if (host_has_waited_for(uses)) {
        counters[block->device].active.add(-bytes);
        give_back(block->owner, block->is_small, block->chunk);
      } else {
        pending.push_back({block->device, block->owner, block->is_small, block->chunk, uses});
      }
      report_memory(*block, -static_cast<int64_t>(block->bytes));
    }
    free(block->data);
    delete block;
  }

  static void note_freed(const Block& block, int stream, const Use& use) {
    if (stream == block.owner || block.recorded.count(stream)) return;
    auto& last = freed[block.owner][stream];
    if (use.time > last.time) last = {use.time, std::to_string(block.bytes) + " bytes of " + block.written.by + ", for " + use.by};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, size_t size) const override { default_copy_data(into, from, size); }
} allocator;

Block* block_of(const at::Tensor& tensor) { return static_cast<Block*>(tensor.storage().data_ptr().get_context()); }

// cuBLAS. A thread takes a handle of each device from a pool and puts it back when it ends. For each handle and stream
// there is a workspace, of the caching allocator's memory, from the first product on and for good.
constexpr size_t kBlasWorkspace = 32 * kMiB;  // on Hopper
std::array<std::vector<int>, kDevices> unused_handles;
std::array<int, kDevices> handles_made{};
std::map<std::tuple<int, int, int>, c10::DataPtr> blas_workspaces;  // by device, handle and stream

struct Handles {
  std::map<int, int> own;  // by device
  ~Handles() {
    Locked locked(everything);
    for (auto& [device, handle] : own) unused_handles[device].push_back(handle);
  }
};
thread_local Handles handles;

void use_blas(int device, int stream) {
  Locked locked(everything);
  auto [place, is_new] = handles.own.try_emplace(device, 0);
  if (is_new) {
    auto& unused = unused_handles[device];
    if (unused.empty()) place->second = handles_made[device]++;
    else {
      place->second = unused.back();
      unused.pop_back();
    }
  }
  std::tuple key{device, place->second, stream};
  if (!blas_workspaces.count(key)) blas_workspaces.emplace(key, Allocator::allocated(kBlasWorkspace, kRounding));
}

bool is_product(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::mm", "aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
      "aten::addbmm", "aten::addmv", "aten::addmv_", "aten::mv", "aten::dot", "aten::vdot", "aten::_int_mm"};
  return names.count(name) > 0;
}

void race(const std::string& text) {
  found_races.push_back(text);
  TORCH_CHECK(false, "race: ", text);
}

void check_after_writer(const Block& block, int stream, const std::string& by, const char* does) {
  if (!has_happened(block.writer, block.written.time, stream))
    race(by + " on " + names[stream] + does + block.written.by + " writes on " + names[block.writer]);
}

void read(const at::Tensor& tensor, int stream, const std::string& by) {
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  check_after_writer(*block, stream, by, " reads what ");
  block->reads[stream] = {clocks[stream][stream], by};
}

void write(const at::Tensor& tensor, int stream, const std::string& by) {
  auto* block = block_of(tensor);
  if (block == nullptr) return;
  check_after_writer(*block, stream, by, " writes over what ");
  for (auto& [reader, use] : block->reads)
    if (!has_happened(reader, use.time, stream))
      race(by + " on " + names[stream] + " writes over what " + use.by + " reads on " + names[reader]);
  block->reads.clear();
  block->writer = stream;
  block->written = {clocks[stream][stream], by};
}

// -------------------------------------------------------------------------------------- devices, streams and events

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point moment;
  bool was_asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < kDevices, "invalid device ordinal");
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    int index = index_of(device);
    return Stream(Stream::UNSAFE, Device(kType, index), current_stream[index]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, Device(kType, index_of(device))); }
  Stream getNewStream(Device device, int) const override {
    Locked locked(everything);
    int index = index_of(device);
    return Stream(Stream::UNSAFE, Device(kType, index), 1 + streams_made[index]++ % kPooledStreams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Locked locked(everything);
    int number = number_of(stream);
    Clock clock{{number, clocks[number][number]}};
    static std::map<int, uint64_t> asked;
    auto last = std::exchange(asked[number], clocks[number][number]);
    return is_done(clock, last == clocks[number][number]);
  }
  // What the host has not waited for is not done when it is asked for the first time.
  static bool is_done(const Clock& clock, bool was_asked) {
    refuse_in_capture();
    if (host_has_waited_for(clock)) return true;
    if (was_asked) host_knows(clock);
    return was_asked;
  }
  void synchronizeStream(const Stream& stream) const override {
    Locked locked(everything);
    host_waits(number_of(stream), "a stream is synchronized");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Locked locked(everything);
    for (auto& [key, stream] : numbers)
      if (key.first == device) host_waits(stream, "a device is synchronized");
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(everything);
    if (*event == nullptr) *event = new Event();
    int number = number_of(stream);
    join(clocks[number], host);
    clocks[number][number]++;
    *static_cast<Event*>(*event) = {clocks[number], std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    Locked locked(everything);
    if (event != nullptr) join(clocks[number_of(stream)], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Locked locked(everything);
    if (event == nullptr) return true;
    auto& asked = *static_cast<Event*>(event);
    return is_done(asked.clock, std::exchange(asked.was_asked, true));
  }
  void synchronizeEvent(void* event) const override {
    Locked locked(everything);
    refuse_in_capture();
    seen_synchronizations.push_back("an event is synchronized");
    if (event != nullptr) host_knows(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto passed = static_cast<Event*>(second)->moment - static_cast<Event*>(first)->moment;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Locked locked(everything);
    if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(number_of(stream));
  }
};

// ------------------------------------------------------------------------------------------------------ generators

// A CPU generator under the device's name: its kernels draw from it.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  Generator(int device, uint64_t seed)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.unsafeGetGeneratorImpl()->set_offset(offset); }
  uint64_t get_offset() const override { return inner.unsafeGetGeneratorImpl()->get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index(), 0);
    copy->set_state(*get_state());
    return copy;
  }
};

std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int device = 0; device < kDevices; device++) made->push_back(at::make_generator<Generator>(device, c10::default_rng_seed_val));
    return made;
  }();
  return *all;
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // found by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kType, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice(Device(kType, device)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return generators()[device < 0 ? ::current_device : device]; }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<::Generator>(device < 0 ? ::current_device : device, c10::default_rng_seed_val);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_ALLOCATOR(kType, &allocator);

// ------------------------------------------------------------------------------------------------------- operators

at::Tensor empty_strided_on(Device device, IntArrayRef size, IntArrayRef stride, at::ScalarType dtype) {
  c10::DeviceGuard guard(device);
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::Tensor(at::detail::empty_strided_generic(size, stride, &allocator, keys, dtype));
}

Device device_or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kType, current_device);
}

at::Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::Tensor(at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  return empty_strided_on(device_or_current(device), size, stride, c10::dtype_or_default(dtype));
}

at::Tensor strided_view(const at::Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return result;
}

at::Tensor reshape_alias(const at::Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return strided_view(self, size, stride, std::nullopt);
}

at::Tensor view(const at::Tensor& self, IntArrayRef size) {
  auto shape = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided_view(self, shape, *stride, std::nullopt);
}

void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  c10::DeviceGuard guard(tensor.device());
  auto larger = allocator.allocate(bytes);
  if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  grow(self, (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &allocator, true);
  return set_storage(self, none, 0, {0}, {1});
}

void resize_storage(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  Guard guard;
  auto before = guard.exchangeDevice(tensor.device());
  auto data = allocator.allocate(bytes);
  guard.setDevice(before);
  if (bytes > 0) std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

void record_stream(at::Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// Tensors of the host that lie in the same memory; those of one storage share one again.
struct OnHost {
  std::map<c10::StorageImpl*, c10::Storage> storages;

  at::Tensor operator()(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto known = storages.find(storage);
    if (known == storages.end()) {
      c10::DataPtr data(const_cast<void*>(tensor.storage().data()), Device(c10::DeviceType::CPU));
      c10::Storage same(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
      known = storages.emplace(storage, same).first;
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(known->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = result.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) result._set_conj(true);
    if (tensor.is_neg()) result._set_neg(true);
    return result;
  }
};

struct BelowEverything {  // the CPU's kernel itself: no autograd, no modes
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(c10::DispatchKey::Python) | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
  at::AutoDispatchBelowADInplaceOrView no_autograd;
};

// A copy from the host reads what an earlier one has written there only if its stream has waited for that one.
void read_host(const at::Tensor& source, int stream, const std::string& by) {
  for (auto one = on_their_way.begin(); one != on_their_way.end();) {
    if (!overlap(one->target, begin_of(source), end_of(source))) {
      ++one;
      continue;
    }
    if (!has_happened(one->stream, one->time, stream)) race(by + " on " + names[stream] + " reads what is copied to the host on " + names[one->stream]);
    std::memcpy(one->target.mutable_data_ptr(), one->copied.const_data_ptr(), one->target.nbytes());
    landed_targets.push_back(one->target);
    one = on_their_way.erase(one);
  }
  departing.push_back({stream, clocks[stream][stream], source.storage().getWeakStorageImpl(), begin_of(source), end_of(source)});
}

void write_host(const at::Tensor& target, int stream, const std::string& by) {
  for (auto& one : on_their_way)
    if (overlap(one.target, begin_of(target), end_of(target)) && !has_happened(one.stream, one.time, stream)) race(by + " on " + names[stream] + " writes over what is copied to the host on " + names[one.stream]);
  for (auto& one : departing)
    if (!one.memory.expired() && overlap(target, one.begin, one.end) && !has_happened(one.stream, one.time, stream)) race(by + " on " + names[stream] + " writes over what is copied from the host on " + names[one.stream]);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  auto let_go = taken_targets();
  const std::string by = "aten::copy_";
  bool from = source.device().type() == kType, into = self.device().type() == kType, lands_later = false;
  int stream = 0;
  {
    Locked locked(everything);
    if (from && into && source.device() != self.device()) {  // on the source's stream, between two waits, as CUDA does
      stream = issue(source.device().index());
      int other = current_number(self.device().index());
      join(clocks[stream], clocks[other]);
      read(source, stream, by);
      write(self, stream, by);
      join(clocks[other], clocks[stream]);
    } else {
      stream = issue(from ? source.device().index() : self.device().index());
      if (from) read(source, stream, by);
      if (into) write(self, stream, by);
      if (into && !from && non_blocking) read_host(source, stream, by);
      if (from && !into) write_host(self, stream, by);
      if (from != into && !non_blocking) host_waits(stream, from ? "copy to the host" : "copy to the device");
      lands_later = from && !into && non_blocking && self.is_contiguous();
      if (from && !into && non_blocking && !lands_later) host_knows(clocks[stream]);  // through a copy, as CUDA has it
    }
  }
  OnHost on_host;
  auto same = [&](const at::Tensor& tensor) { return tensor.device().type() == kType ? on_host(tensor) : tensor; };
  auto target = same(self), read_from = same(source.expand(self.sizes()));
  BelowEverything below;
  if (lands_later) {
    Locked locked(everything);
    std::memset(self.mutable_data_ptr(), 0xff, self.nbytes());
    on_their_way.push_back({stream, clocks[stream][stream], of_its_own(self), at::empty_like(self).copy_(read_from)});
    return self;
  }
  target.copy_(read_from);
  return self;
}

bool is_question(const c10::OperatorHandle& op, const Stack& arguments) {
  static const std::set<std::string> always = {
      "aten::_local_scalar_dense", "aten::nonzero",           "aten::masked_select",          "aten::_unique2",  "aten::unique_dim",
      "aten::unique_consecutive",  "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::equal"};
  static const std::set<std::string> by_mask = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  const auto& name = op.schema().name();
  if (always.count(name)) return true;
  if (!by_mask.count(name)) return false;
  for (const auto& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    for (std::optional<at::Tensor> index : argument.toOptionalTensorList())
      if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  }
  return false;
}

// One call of an operator: its arguments on the host, and what it returns, on the device again.
struct Call {
  const std::string name;
  OnHost on_host;
  int device = -1;
  std::optional<at::Generator> generator;
  std::vector<at::Tensor> reads;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // on the host, on the device
  std::vector<at::Tensor> held;
  std::map<c10::TensorImpl*, at::Tensor> same;  // tensors of the device by those of the host
  std::map<const void*, at::Tensor> by_memory;
  int stream = 0;

  at::Tensor given(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      bool index = name.find("index") != std::string::npos;
      TORCH_CHECK(tensor.device().type() != c10::DeviceType::CPU || tensor.dim() == 0 || index, name,
                  ": Expected all tensors to be on the same device, but found one on the CPU, of sizes ", tensor.sizes());
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.device().index(), name,
                ": Expected all tensors to be on the same device, but found cuda:", device, " and ", tensor.device());
    device = tensor.device().index();
    auto result = on_host(tensor);
    held.push_back(result);
    same[result.unsafeGetTensorImpl()] = tensor;
    if (tensor.storage().data()) by_memory.emplace(tensor.storage().data(), tensor);
    if (writes) written.emplace_back(result, tensor);
    else reads.push_back(tensor);
    return result;
  }

  c10::IValue given(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return given(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(given(tensor, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(given(*tensor, writes)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      if (device < 0) device = device_or_current(value.toDevice()).index();
      return Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator()) {
      generator = value.toGenerator();
      return c10::IValue();
    }
    return value;
  }

  at::Tensor returned(const at::Tensor& result) {
    if (!result.defined()) return result;
    auto known = same.find(result.unsafeGetTensorImpl());
    if (known != same.end()) return known->second;
    auto base = by_memory.find(result.storage().data());
    if (result.storage().data() && base != by_memory.end()) return strided_view(base->second, result.sizes(), result.strides(), result.storage_offset());
    auto made = empty_strided_on(Device(kType, device), result.sizes(), result.strides(), result.scalar_type());
    if (result.numel()) {
      auto bytes = result.storage().nbytes() - result.storage_offset() * result.itemsize();
      std::memcpy(made.mutable_data_ptr(), result.const_data_ptr(), std::min(made.storage().nbytes(), bytes));
      Locked locked(everything);
      write(made, stream, name);
    }
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(returned(tensor));
    return list;
  }

  void take_over_resized() {  // results that were given with another size
    for (auto& [result, tensor] : written) {
      if (result.sizes() == tensor.sizes()) continue;
      grow(tensor, result.nbytes());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      if (result.numel()) std::memcpy(tensor.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
      Locked locked(everything);
      write(tensor, stream, name);
    }
  }
};

using Kernel = std::function<void(Stack&)>;

void draw(const std::string& name, const Kernel& kernel, Stack& arguments, const at::Generator& generator) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> locked(one_at_a_time);
  TORCH_CHECK(generator.device().type() == kType, name, ": expected a generator of CUDA's");
  auto inner = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
  auto host_generator = at::detail::getDefaultCPUGenerator();
  auto before = host_generator.get_state();
  host_generator.set_state(inner.get_state());
  kernel(arguments);
  inner.set_state(host_generator.get_state());
  host_generator.set_state(before);
}

// Run an operator. Of its results those at ``on_host`` stay there.
void run_kernel(const c10::OperatorHandle& op, Stack* stack, const Kernel& kernel, const std::set<size_t>& on_host = {}) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  Call call{schema.name()};
  Stack given;
  for (size_t place = 0; place < count; place++) {
    const auto* alias = schema.arguments()[place].alias_info();
    given.push_back(call.given(arguments[place], alias != nullptr && alias->isWrite()));
  }
  if (call.device < 0) call.device = current_device;
  c10::DeviceGuard guard(Device(kType, call.device));
  {
    Locked locked(everything);
    call.stream = issue(call.device);
    for (auto& tensor : call.reads) read(tensor, call.stream, call.name);
    for (auto& [result, tensor] : call.written) write(tensor, call.stream, call.name);
    if (is_question(op, given)) host_waits(call.stream, call.name);
    if (is_product(call.name)) use_blas(call.device, call.stream);
  }
  {
    BelowEverything below;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) draw(call.name, kernel, given, call.generator.value_or(generators()[call.device]));
    else kernel(given);
  }
  call.take_over_resized();
  torch::jit::drop(*stack, count);
  for (size_t place = 0; place < given.size(); place++)
    stack->push_back(on_host.count(place) ? given[place] : call.returned(given[place]));
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  run_kernel(op, stack, [&](Stack& arguments) { op.callBoxed(&arguments); });
}

// Efficient attention. Seed and offset of its random numbers are on the host, whatever the fake kernel says, and the
// backward reads them through a pointer of the host's: those of a device end the process.
int64_t attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool grouped) {
  constexpr int64_t kMath = 0, kEfficient = 2;
  auto dtype = query.scalar_type();
  bool is_known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  if (!is_known || grouped || query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return kMath;
  int64_t multiple = dtype == at::kFloat ? 4 : 8;
  for (auto* one : {&query, &key, &value})
    if (one->scalar_type() != dtype || one->sym_size(-1) % multiple != 0 || one->sym_size(0) != query.sym_size(0) || one->sym_size(1) != query.sym_size(1)) return kMath;
  if (query.sym_size(2) == 0 || key.sym_size(2) == 0 || (mask && mask->defined() && is_causal)) return kMath;
  return at::globalContext().userEnabledMemEfficientSDP() ? kEfficient : kMath;
}

struct AttentionWeights {
  at::Tensor scores, kept;
  double scale;

  AttentionWeights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& bias, double dropout, bool is_causal,
                   const c10::IValue& asked_scale, int64_t seed, int64_t offset) {
    scale = asked_scale.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : asked_scale.toDouble();
    scores = at::matmul(query.to(at::kFloat), key.to(at::kFloat).transpose(-2, -1)) * scale;
    if (bias.defined()) scores = scores + bias;
    if (is_causal) scores.masked_fill_(at::ones({query.size(2), key.size(2)}, at::kBool).tril().logical_not(), -INFINITY);
    if (dropout > 0) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed) ^ static_cast<uint64_t>(offset) << 32);
      kept = at::rand(scores.sizes(), generator).ge(dropout).to(at::kFloat) / (1 - dropout);
    }
  }
  at::Tensor with_kept(const at::Tensor& weights) const { return kept.defined() ? weights * kept : weights; }
};

at::Tensor optional_tensor(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }

at::Tensor rows_first(const at::Tensor& tensor, const at::Tensor& like) {
  return at::empty_permuted(tensor.sizes(), {0, 2, 1, 3}, like.options()).copy_(tensor);
}

void efficient_attention(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto kernel = [](Stack& given) {
    auto query = given[0].toTensor(), key = given[1].toTensor(), value = given[2].toTensor(), bias = optional_tensor(given[3]);
    bool with_sums = given[4].toBool();
    double dropout = given[5].toDouble();
    auto seed = at::empty({}, at::kLong), offset = at::empty({}, at::kLong);
    if (dropout > 0) {
      seed.random_();
      offset.random_(1 << 16);
    }
    int64_t from = dropout > 0 ? *seed.const_data_ptr<int64_t>() : 0, at = dropout > 0 ? *offset.const_data_ptr<int64_t>() : 0;
    AttentionWeights own(query, key, bias, dropout, given[6].toBool(), given[7], from, at);
    auto sums = at::logsumexp(own.scores, {-1});
    auto weights = (own.scores - sums.unsqueeze(-1)).exp().nan_to_num(0);
    auto out = rows_first(at::matmul(own.with_kept(weights), value.to(at::kFloat)), query);
    int64_t rows = query.size(2), padded = with_sums ? (rows + 31) / 32 * 32 : 0;
    auto returned = at::full({query.size(0), query.size(1), padded}, INFINITY, at::kFloat);
    if (with_sums) returned.narrow(2, 0, rows).copy_(sums);
    given = {out, returned, seed, offset};
  };
  run_kernel(op, stack, kernel, {2, 3});
}

void efficient_attention_backward(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (arguments[9].toDouble() > 0)
    for (auto& seed : {arguments[7].toTensor(), arguments[8].toTensor()})
      if (seed.device().type() != c10::DeviceType::CPU) race("segmentation fault: the backward of efficient attention reads its seed, which is on the device, through a pointer of the host's");
  auto kernel = [](Stack& given) {
    auto incoming = given[0].toTensor().to(at::kFloat), query = given[1].toTensor(), key = given[2].toTensor(), value = given[3].toTensor();
    auto bias = optional_tensor(given[4]), out = given[5].toTensor(), sums = given[6].toTensor();
    double dropout = given[9].toDouble();
    auto wanted = given[10].toBoolList();
    int64_t seed = dropout > 0 ? *given[7].toTensor().const_data_ptr<int64_t>() : 0, offset = dropout > 0 ? *given[8].toTensor().const_data_ptr<int64_t>() : 0;
    AttentionWeights own(query, key, bias, dropout, given[11].toBool(), given[12], seed, offset);
    auto weights = (own.scores - sums.narrow(2, 0, query.size(2)).unsqueeze(-1)).exp().nan_to_num(0);
    auto of_value = at::matmul(own.with_kept(weights).transpose(-2, -1), incoming);
    auto of_weights = own.with_kept(at::matmul(incoming, value.to(at::kFloat).transpose(-2, -1)));
    auto of_scores = weights * (of_weights - (incoming * out).sum({-1}, true));
    auto of_query = at::matmul(of_scores, key.to(at::kFloat)) * own.scale;
    auto of_key = at::matmul(of_scores.transpose(-2, -1), query.to(at::kFloat)) * own.scale;
    at::Tensor of_bias;
    if (bias.defined() && wanted[3]) {
      auto padded = bias.sizes().vec();
      padded.back() = (padded.back() + 15) / 16 * 16;
      of_bias = at::empty(padded, bias.options()).narrow(-1, 0, bias.size(-1)).copy_(at::sum_to(of_scores, bias.sizes()));
    }
    given = {rows_first(of_query, query), rows_first(of_key, key), rows_first(of_value, value), of_bias};
  };
  run_kernel(op, stack, kernel);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", strided_view);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("copy_", copy);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", attention_kernel);
  library.impl("_scaled_dot_product_efficient_attention", torch::CppFunction::makeFromBoxedFunction<&efficient_attention>());
  library.impl("_scaled_dot_product_efficient_attention_backward", torch::CppFunction::makeFromBoxedFunction<&efficient_attention_backward>());
}

at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> chooses(at::native::_fused_sdp_choice_stub, &attention_kernel);

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

std::vector<std::string> taken(std::vector<std::string>& from) {
  Locked locked(everything);
  return std::exchange(from, {});
}

void communicates(const std::string& by, const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& targets) {
  Locked locked(everything);
  int stream = issue(current_device);
  for (auto& source : sources) read(source, stream, by);
  for (auto& target : targets) write(target, stream, by);
}

}  // namespace

PYBIND11_MODULE(emulated_device, module) {
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int device) { Guard().setDevice(Device(kType, device)); });
  module.def("synchronize", [](int device) { Guard().synchronizeDevice(device); });
  module.def("generator", [](int device) { return generators()[device]; });
  module.def("capacity", [] { return kCapacity; });
  module.def("counters", [](int device) {
    Locked locked(everything);
    auto& [allocated, active, reserved] = counters[device];
    using Both = std::pair<int64_t, int64_t>;
    return std::tuple{Both{allocated.now, allocated.peak}, Both{active.now, active.peak}, Both{reserved.now, reserved.peak}};
  }, "Bytes allocated, active and reserved: each now and at the peak.");
  module.def("reset_peak", [](int device) {
    Locked locked(everything);
    auto& count = counters[device];
    for (auto* one : {&count.allocated, &count.active, &count.reserved}) one->peak = one->now;
  });
  module.def("snapshot", snapshot);
  module.def("use_blas", [] {
    Locked locked(everything);
    use_blas(current_device, current_number(current_device));
  });
  module.def("capture", [](bool begins) { is_capturing = begins; });
  module.def("is_capturing", [] { return is_capturing; });
  module.def("races", [] { return taken(found_races); }, "Races since the last call, which are forgotten then.");
  module.def("synchronizations", [] { return taken(seen_synchronizations); }, "Likewise: what the host waited for.");
  module.def("empty_cache", empty_cache);
  module.def("resize_storage", resize_storage);
  module.def("communicates", communicates, "An operation of communication, on the current stream of the tensors' device.");
  module.def("refuse_synchronizations", [](bool refuse) { refuse_synchronizations = refuse; });
}

// A CUDA device that is host memory, for a CPU build of PyTorch: tensors of cuda:N whose operators run on the CPU.
//
// What a CPU hides shows here: operators refuse tensors of several devices; fresh and freed memory is NaN; a copy that
// does not block happens when somebody waits, and its pinned source must not change before; every wait is reported.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int MOST = 8;

static DeviceIndex num_devices = 1;
static thread_local DeviceIndex current = 0;
static thread_local c10::StreamId stream_of[MOST];
static thread_local int quiet = 0;  // inside an operator: what it does is no wait of the program
static std::recursive_mutex mutex;
static py::object* report = nullptr;

static void tell(const char* kind, const std::string& what) {
  if (quiet || !report) return;
  py::gil_scoped_acquire gil;
  (*report)(kind, what);
}

struct Quiet {
  Quiet() { quiet++; }
  ~Quiet() { quiet--; }
};
struct OnDevice {
  DeviceIndex before = current;
  explicit OnDevice(DeviceIndex index) { current = index < 0 ? current : index; }
  ~OnDevice() { current = before; }
};

// ---------------------------------------------------------------------------------------------- memory

struct Block {
  size_t size;
  DeviceIndex device;  // -1: pinned memory of the host
};
static std::map<const char*, Block> blocks;
static int64_t held[MOST], peak[MOST];

static void release(void* data) {
  std::lock_guard lock(mutex);
  auto found = blocks.find(static_cast<char*>(data));
  if (found == blocks.end()) return;
  if (found->second.device >= 0) held[found->second.device] -= found->second.size;
  memset(data, 0xFF, found->second.size);
  blocks.erase(found);
  free(data);
}

template <bool pinned>
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const Device device = pinned ? Device(at::kCPU) : Device(CUDA, current);
    if (!size) return {nullptr, device};
    void* data = aligned_alloc(512, (size + 511) / 512 * 512);
    memset(data, 0xFF, size);
    std::lock_guard lock(mutex);
    blocks[static_cast<char*>(data)] = {size, pinned ? DeviceIndex(-1) : current};
    if (!pinned) peak[current] = std::max(peak[current], held[current] += size);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static Memory<false> device_memory;
static Memory<true> pinned_memory;

static bool is_pinned(const void* data) {
  std::lock_guard lock(mutex);
  auto next = blocks.upper_bound(static_cast<const char*>(data));
  if (next == blocks.begin()) return false;
  const auto& [start, block] = *--next;
  return block.device < 0 && data < start + block.size;
}

// The same memory as a tensor of the CPU.
static Tensor host(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// ---------------------------------------------------------------------------------------------- copies that wait

struct Copy {
  int64_t number;
  DeviceIndex device;
  c10::StreamId stream;
  Tensor target, value;  // to pinned memory: written when somebody waits
  Tensor source;         // from pinned memory: must be still the same then
};
static std::list<Copy> copies;
static std::atomic<int64_t> clock_{0}, last_stream{0};

// Finish the copies of a device up to a number; of all streams where `stream` is -1.
static void finish(DeviceIndex device, c10::StreamId stream = -1, int64_t upto = INT64_MAX) {
  std::list<Copy> done;
  {
    std::lock_guard lock(mutex);
    for (auto it = copies.begin(); it != copies.end();) {
      auto here = it++;
      if (here->device == device && (stream < 0 || here->stream == stream) && here->number < upto)
        done.splice(done.end(), copies, here);
    }
  }
  for (auto& copy : done) {
    bool changed = false;
    {
      Quiet q;
      if (copy.target.defined()) copy.target.copy_(copy.value);
      else changed = memcmp(copy.source.contiguous().data_ptr(), copy.value.data_ptr(), copy.value.nbytes()) != 0;
    }
    if (changed) tell("race", "the pinned source of a queued copy was changed");
  }
}

static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_meta() || source.is_meta() || self.numel() == 0) return self;
  const bool to = self.is_cuda(), from = source.is_cuda();
  at::AutoDispatchBelowADInplaceOrView below;
  if (to && from) {
    Quiet q;
    host(self).copy_(host(source));
    return self;
  }
  const DeviceIndex device = to ? self.get_device() : source.get_device();
  const bool pinned = is_pinned(to ? source.const_data_ptr() : self.const_data_ptr());
  // A copy from pageable memory is staged, so it may return; one to pageable memory cannot.
  const bool waits = !non_blocking || (from && !pinned);
  if (waits && !quiet) {
    tell("wait", to ? "copy to the device" : "copy to the host");
    finish(device, stream_of[device]);
  }
  const bool queued = !waits && pinned && !quiet;
  Quiet q;
  Tensor value = (to ? source : host(source)).contiguous();
  if (queued && (from || value.is_same(source))) value = value.clone();
  if (!queued || to) (to ? host(self) : self).copy_(value);
  if (queued && from) self.is_floating_point() ? self.fill_(NAN) : self.fill_(1);
  if (queued) {
    std::lock_guard lock(mutex);
    Copy copy{clock_++, device, stream_of[device], from ? self.detach() : Tensor(), value, to ? source.detach() : Tensor()};
    copies.push_back(copy);
  }
  return self;
}

// ---------------------------------------------------------------------------------------------- device, streams, events

struct Event {
  int64_t number;
  double milliseconds;
  Stream stream;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex of(Device device) { return device.has_index() ? device.index() : current; }
  static Stream make(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(CUDA, of(device)), id); }
  c10::DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return {CUDA, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < num_devices, "CUDA error: invalid device ordinal");
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream getStream(Device device) const override { return make(device, stream_of[of(device)]); }
  Stream getDefaultStream(Device device) const override { return make(device, 0); }
  Stream getNewStream(Device device, int) const override { return make(device, ++last_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return make(device, ++last_stream); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    stream_of[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    tell("wait", "stream");
    finish(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    tell("wait", "device");
    finish(device < 0 ? current : device);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    destroyEvent(*event, 0);
    *event = new Event{clock_++, std::chrono::duration<double, std::milli>(now).count(), stream};
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    tell("wait", "event");
    auto* found = static_cast<Event*>(event);
    if (found) finish(found->stream.device_index(), found->stream.id(), found->number);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A generator of the CPU that says it is the device's, but for the duration of an operator.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) { stand_on(Device(CUDA, index)); }
  void stand_on(Device device) {
    device_ = device;
    key_set_ = c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  }
};
static at::Generator generator(DeviceIndex index) {
  static std::map<DeviceIndex, at::Generator> own;
  if (!own.count(index)) own.emplace(index, at::make_generator<Generator>(index));
  return own.at(index);
}

struct PretendHooks final : at::CUDAHooksInterface {
  explicit PretendHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::map<DeviceIndex, at::Generator> kept;
    const DeviceIndex own = index < 0 ? current : index;
    return kept.emplace(own, generator(own)).first->second;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return {CUDA, current}; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({CUDA, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return Guard().exchangeDevice({CUDA, index}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return index < 0 ? current : exchangeDevice(index); }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};
namespace at {
using ::PretendHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)
}  // namespace at

// ---------------------------------------------------------------------------------------------- operators

static const std::set<std::string> WAITING = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                              "aten::multinomial", "aten::linalg_eigh", "aten::_linalg_eigh"};

// On the CPU, with the checks of a device around it.
static void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  const bool indexing = name.find("index") != std::string::npos;  // indices may be on the CPU, at the price of a wait
  const size_t first = stack->size() - op.schema().arguments().size();
  std::set<std::string> places;
  std::vector<Generator*> generators;
  std::vector<c10::IValue*> scalars;
  DeviceIndex device = -1;
  auto see = [&](const Tensor& tensor, bool index) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) device = tensor.get_device();
    const bool mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    if (index && (mask || tensor.is_cpu())) tell("wait", mask ? "a mask as an index" : "an index of the host");
    if (!index && (tensor.dim() > 0 || tensor.is_cuda())) places.insert(tensor.device().str());
  };
  for (size_t i = first; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      see(value.toTensor(), false);
      if (value.toTensor().defined() && value.toTensor().is_cpu() && !value.toTensor().dim()) scalars.push_back(&value);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) see(tensor, false);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) see(*tensor, indexing);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      generators.push_back(static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl()));
    }
  }
  TORCH_CHECK(places.size() < 2, "Expected all tensors to be on the same device, but found at least two devices, ",
              *places.begin(), " and ", *places.rbegin(), "! (", name, ")");
  OnDevice guard(device);
  if (WAITING.count(name)) {
    tell("wait", name);
    finish(current, stream_of[current]);
  }
  Quiet q;
  // The fallback takes the device of its result from the first tensor.
  if (device >= 0) for (auto* value : scalars) *value = value->toTensor().to(Device(CUDA, device));
  for (auto* each : generators) each->stand_on(at::kCPU);
  auto back = [&] { for (auto* each : generators) each->stand_on({CUDA, current}); };
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    back();
    throw;
  }
  back();
}

static c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::CUDA); }
static at::ScalarType type_or_default(std::optional<at::ScalarType> type) { return type.value_or(at::get_default_dtype_as_scalartype()); }

static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_generic(size, &device_memory, keys(), type_or_default(type), format);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys(), type_or_default(type));
}
static at::Scalar item(const Tensor& self) {
  tell("wait", "item");
  if (!quiet) finish(self.get_device(), stream_of[self.get_device()]);
  return host(self).item();
}
static void resize_storage(c10::Storage storage, size_t size) {
  OnDevice guard(storage.device().index());
  auto fresh = device_memory.allocate(size);
  if (size && storage.nbytes()) memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}
static const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
static Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor written = target;
  return copy_(written, self, non_blocking);
}
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (self.sizes() != target.sizes()) resize_(target, self.sizes(), {});
  return copy_from(self, target, false);
}
static Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}
static Tensor& set_source(Tensor& self, c10::Storage storage) {
  return set_storage(self, storage, 0, {static_cast<int64_t>(storage.nbytes() / self.itemsize())}, {});
}
static Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
static Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
static void record_stream(Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("record_stream", record_stream);
  // Composites that would look for a kernel of the device's own.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(CUDA, &device_memory, 255);
  m.def("start", [](int devices, py::object function) {
    num_devices = devices;
    report = new py::object(function);
  });
  m.def("current", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice({CUDA, static_cast<DeviceIndex>(index)}); });
  m.def("synchronize", [](int index) { Guard().synchronizeDevice(index); });
  m.def("generator", [](int index) { return generator(index); });
  m.def("host", &host);
  m.def("quiet", [](bool on) { quiet += on ? 1 : -1; });
  m.def("held", [](int index) { return held[index]; });
  m.def("peak", [](int index) { return peak[index]; });
  m.def("reset_peak", [](int index) { peak[index] = held[index]; });
  m.def("resize_storage", &resize_storage);
}

// A stand-in for libcuda.so.1 under PyCUDA itself: devices in host memory whose kernels do nothing, which
// enforces the rules that drivers have for contexts, handles, memory and captures. What a correct program
// never does is told on standard error ("stub driver: ...") and refused; what it may try, such as to take too
// much memory, is only refused. It counts what is alive. Numbers of attributes and errors are those of
// cuda.h. Environment: STUB_INIT, STUB_CAPTURE, STUB_PEER (what these calls return), STUB_PEER_CORRUPTS,
// STUB_DEVICES, STUB_FREE_MIB, STUB_LOST_IN (a kernel that takes the device along).

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidImage = 200,
              kInvalidContext = 201, kPeerUnsupported = 217, kInvalidHandle = 400, kNotReady = 600,
              kIllegalAddress = 700, kPeerEnabled = 704, kPeerNotEnabled = 705, kNotSupported = 801,
              kCaptureUnsupported = 900, kCaptureInvalidated = 901;
// The attributes, and what a block may have on sm_90.
constexpr int kSharedSize = 1, kMaxDynamicShared = 8;
constexpr unsigned kMostShared = 227 << 10, kDefaultShared = 48 << 10, kStaticShared = 1024;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76, kRelaxed = 2, kMostDevices = 8;
constexpr std::size_t kTotal = std::size_t{8} << 30;

using Address = unsigned long long;

struct Context {
    int device;
    std::size_t used = 0;
    bool lost = false;
    std::set<const Context*> peers;
};
struct Memory {
    std::size_t bytes;
    Context* context;
};
struct Owned {
    Context* context;
};
struct Stream : Owned {
    bool capturing = false;
    std::size_t captured = 0;
};
struct Event : Owned {
    bool timed = true, recorded = false, in_capture = false;
};
struct Module : Owned {};
// A kernel, and the dynamic shared memory that it may have.
struct Function : Owned {
    Module* module;
    std::string name;
    unsigned dynamic = kDefaultShared - kStaticShared;
    bool loaded = false;
};
struct Graph {
    std::size_t nodes;
};
struct Executable : Owned {};

static std::mutex mutex;
static Context all_contexts[kMostDevices];
static std::map<Address, Memory> memory;
static std::map<Address, std::size_t> pinned;
static std::set<void*> streams, events, modules, functions, graphs, executables;
static thread_local Context* stack[64];
static thread_local int depth, captures, strict_captures;

extern "C" {
int live_streams, live_events, live_pinned, live_memory, live_modules, live_graphs, contexts, launches,
    violations, parameter_bytes;
}

static int setting(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}
static std::size_t free_bytes() { return std::size_t(setting("STUB_FREE_MIB", 4096)) << 20; }

static int violation(int error, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fputs("stub driver: ", stderr);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    va_end(arguments);
    ++violations;
    return error;
}

// The state of the calling thread's context; nothing but pushing and popping goes on without one, or after an
// error that a kernel left.
static Context* current() { return depth ? stack[depth - 1] : nullptr; }

#define BEGIN                                                                                  \
    std::lock_guard<std::mutex> lock(mutex);                                                   \
    Context* const context = current();                                                        \
    if (!context) return violation(kInvalidContext, "%s without a current context", __func__); \
    if (context->lost) return kIllegalAddress

#define UNSAFE_IN_CAPTURE \
    if (strict_captures) return violation(kCaptureUnsupported, "%s during a capture", __func__)

template <typename T>
static T* alive(const std::set<void*>& known, void* handle) {
    return known.count(handle) ? static_cast<T*>(handle) : nullptr;
}

// A handle must be of something that was not destroyed, in the current context.
#define OWN(type, name, known, handle)                                                            \
    auto* const name = alive<type>(known, handle);                                                \
    if (!name) return violation(kInvalidHandle, "%s of a destroyed or unknown " #type, __func__); \
    if (name->context != context)                                                                 \
    return violation(kInvalidHandle, "%s of a " #type " of another context", __func__)

template <typename T>
static int create(void** handle, T* made, std::set<void*>& known, int& live) {
    known.insert(made);
    ++live;
    return *handle = made, 0;
}

template <typename T>
static int destroy(T* made, std::set<void*>& known, int& live) {
    known.erase(made);
    --live;
    delete made;
    return 0;
}

// Whether memory that was allocated in a context, and not freed, holds a range.
static bool inside(Address address, std::size_t bytes, const Context* owner) {
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return false;
    const auto& [start, block] = *--after;
    return block.context == owner && address + bytes <= start + block.bytes;
}

static bool is_pinned(const void* address, std::size_t bytes) {
    const auto wanted = reinterpret_cast<Address>(address);
    auto after = pinned.upper_bound(wanted);
    if (after == pinned.begin()) return false;
    --after;
    return wanted + bytes <= after->first + after->second;
}

#define IN_MEMORY(address, bytes, owner)                                                                 \
    if (!inside(address, bytes, owner))                                                                  \
    return violation(kInvalidValue, "%s: %zu bytes at %llx are no memory of device %d", __func__, bytes, \
                     address, (owner)->device)

#define PINNED_IN_CAPTURE(stream, host, bytes)          \
    if ((stream)->capturing && !is_pinned(host, bytes)) \
    return violation(kCaptureUnsupported, "%s of pageable memory during a capture", __func__)

extern "C" {

int cuInit(unsigned) {
    for (int i = 0; i < kMostDevices; ++i) all_contexts[i].device = i;
    return setting("STUB_INIT", 0);
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR", 0; }
int cuGetErrorString(int error, const char** text) {
    static const std::map<int, const char*> texts = {
        {kInvalidValue, "invalid argument"},
        {kOutOfMemory, "out of memory"},
        {kNoDevice, "no CUDA-capable device is detected"},
        {kInvalidImage, "device kernel image is invalid"},
        {kInvalidContext, "invalid device context"},
        {kPeerUnsupported, "peer access is not supported between these two devices"},
        {kInvalidHandle, "invalid resource handle"},
        {kNotReady, "device not ready"},
        {kIllegalAddress, "an illegal memory access was encountered"},
        {kPeerEnabled, "peer access is already enabled"},
        {kPeerNotEnabled, "peer access has not been enabled"},
        {kNotSupported, "operation not supported"},
        {kCaptureUnsupported, "operation not permitted when stream is capturing"},
        {kCaptureInvalidated, "operation failed due to a previous error during capture"},
    };
    const auto found = texts.find(error);
    return *text = found == texts.end() ? "unknown error" : found->second, 0;
}

int cuDeviceGetCount(int* count) { return *count = setting("STUB_DEVICES", 2), 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) {
    return std::snprintf(name, size, "Stub %d", device), 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = kTotal, 0; }
int cuDeviceComputeCapability(int* major, int* minor, int) { return *major = 9, *minor = 0, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == kCapabilityMajor ? 9 : attribute == kCapabilityMinor ? 0 : 1;
    return 0;
}
int cuDeviceGetPCIBusId(char* id, int size, int device) {
    return std::snprintf(id, size, "0000:0%d:00.0", device), 0;
}
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
    ++contexts;
    return *context = &all_contexts[device], 0;
}

int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = static_cast<Context*>(context), 0; }
int cuCtxPopCurrent_v2(void** context) {
    if (!depth) return violation(kInvalidContext, "cuCtxPopCurrent without a current context");
    --depth;
    if (context) *context = stack[depth];
    return 0;
}
int cuCtxGetDevice(int* device) {
    BEGIN;
    return *device = context->device, 0;
}
int cuCtxEnablePeerAccess(void* peer, unsigned) {
    BEGIN;
    if (peer == context) return violation(kInvalidValue, "peer access of a context to itself");
    if (const int error = setting("STUB_PEER", 0)) return error;
    return context->peers.insert(static_cast<Context*>(peer)).second ? 0 : kPeerEnabled;
}
int cuCtxDisablePeerAccess(void* peer) {
    BEGIN;
    return context->peers.erase(static_cast<Context*>(peer)) ? 0
                                                             : violation(kPeerNotEnabled, "no peer access");
}

int cuCtxSynchronize() {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    return 0;
}

int cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
    BEGIN;
    return *available = free_bytes() - context->used, *total = kTotal, 0;
}
int cuMemAlloc_v2(Address* address, std::size_t bytes) {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    if (!bytes) return violation(kInvalidValue, "cuMemAlloc of nothing");
    if (bytes > free_bytes() - context->used) return kOutOfMemory;
    void* const block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    // Kernels write nothing, and results must be numbers.
    std::memset(block, 0, bytes);
    memory[reinterpret_cast<Address>(block)] = {bytes, context};
    context->used += bytes;
    ++live_memory;
    return *address = reinterpret_cast<Address>(block), 0;
}
int cuMemFree_v2(Address address) {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    const auto found = memory.find(address);
    if (found == memory.end()) return violation(kInvalidValue, "cuMemFree of no allocation: %llx", address);
    if (found->second.context != context)
        return violation(kInvalidValue, "cuMemFree in another context: %llx", address);
    context->used -= found->second.bytes;
    memory.erase(found);
    --live_memory;
    std::free(reinterpret_cast<void*>(address));
    return 0;
}
int cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    if (bytes > free_bytes()) return kOutOfMemory;
    *address = std::malloc(bytes);
    pinned[reinterpret_cast<Address>(*address)] = bytes;
    return ++live_pinned, 0;
}
int cuMemFreeHost(void* address) {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    if (!pinned.erase(reinterpret_cast<Address>(address)))
        return violation(kInvalidValue, "cuMemFreeHost of memory that is not pinned");
    std::free(address);
    return --live_pinned, 0;
}
int cuMemcpyHtoDAsync_v2(Address target, const void* source, std::size_t bytes, void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    IN_MEMORY(target, bytes, context);
    PINNED_IN_CAPTURE(stream, source, bytes);
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void* target, Address source, std::size_t bytes, void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    IN_MEMORY(source, bytes, context);
    PINNED_IN_CAPTURE(stream, target, bytes);
    std::memcpy(target, reinterpret_cast<void*>(source), bytes);
    return 0;
}
int cuMemcpyDtoDAsync_v2(Address target, Address source, std::size_t bytes, void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    IN_MEMORY(target, bytes, context);
    IN_MEMORY(source, bytes, context);
    std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
    return 0;
}
int cuMemcpyPeerAsync(Address target, void* target_context, Address source, void* source_context,
                      std::size_t bytes, void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    IN_MEMORY(target, bytes, static_cast<Context*>(target_context));
    IN_MEMORY(source, bytes, static_cast<Context*>(source_context));
    if (stream->capturing) return violation(kCaptureUnsupported, "cuMemcpyPeerAsync during a capture");
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
    const bool direct = context->peers.count(static_cast<Context*>(target_context));
    if (direct && setting("STUB_PEER_CORRUPTS", 0)) *reinterpret_cast<char*>(target) ^= 1;
    return 0;
}
int cuMemsetD8Async(Address target, unsigned char value, std::size_t bytes, void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    IN_MEMORY(target, bytes, context);
    std::memset(reinterpret_cast<void*>(target), value, bytes);
    return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
    BEGIN;
    if (flags != 1) return violation(kInvalidValue, "a stream that waits for the default stream");
    return create(stream, new Stream{{context}}, streams, live_streams);
}
int cuStreamDestroy_v2(void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    if (stream->capturing) return violation(kCaptureUnsupported, "a stream destroyed during its capture");
    return destroy(stream, streams, live_streams);
}
int cuStreamSynchronize(void* handle) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    if (stream->capturing) return violation(kCaptureUnsupported, "a captured stream was waited for");
    return 0;
}
int cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    // Events of other devices may be waited for.
    if (!alive<Event>(events, event_handle))
        return violation(kInvalidHandle, "cuStreamWaitEvent of a destroyed event");
    if (stream->capturing) return violation(kCaptureUnsupported, "cuStreamWaitEvent during a capture");
    return 0;
}
int cuEventCreate(void** event, unsigned flags) {
    BEGIN;
    auto* const made = new Event{{context}};
    made->timed = !(flags & 2);
    return create(event, made, events, live_events);
}
int cuEventDestroy_v2(void* handle) {
    BEGIN;
    OWN(Event, event, events, handle);
    return destroy(event, events, live_events);
}
int cuEventRecord(void* handle, void* stream_handle) {
    BEGIN;
    OWN(Event, event, events, handle);
    OWN(Stream, stream, streams, stream_handle);
    event->recorded = true;
    event->in_capture = stream->capturing;
    return 0;
}
int cuEventSynchronize(void* handle) {
    BEGIN;
    OWN(Event, event, events, handle);
    if (event->in_capture) return violation(kCaptureUnsupported, "an event of a capture was waited for");
    return 0;
}
int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    BEGIN;
    OWN(Event, first, events, start);
    OWN(Event, last, events, end);
    if (!first->recorded || !last->recorded || !first->timed || !last->timed)
        return violation(kInvalidHandle, "cuEventElapsedTime of events without a time");
    return *milliseconds = 1, 0;
}
// cuda.h of CUDA 13 names this one.
int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned n, int* options, void** values) {
    BEGIN;
    UNSAFE_IN_CAPTURE;
    // The sizes of the logs (info, error) become those of what was written.
    for (unsigned i = 0; i < n; ++i)
        if (options[i] == 4 || options[i] == 6) values[i] = nullptr;
    if (std::strncmp(static_cast<const char*>(image), "damaged", 7) == 0) return kInvalidImage;
    return create(module, new Module{{context}}, modules, live_modules);
}
int cuModuleUnload(void* handle) {
    BEGIN;
    OWN(Module, module, modules, handle);
    return destroy(module, modules, live_modules);
}
int cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
    BEGIN;
    OWN(Module, module, modules, module_handle);
    auto* const function = new Function{{context}, module, name};
    functions.insert(function);
    return *handle = function, 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* handle) {
    BEGIN;
    OWN(Function, function, functions, handle);
    return *value = attribute == kSharedSize         ? int(kStaticShared)
                    : attribute == kMaxDynamicShared ? int(function->dynamic)
                                                     : 0,
           0;
}
int cuFuncSetAttribute(void* handle, int attribute, int value) {
    BEGIN;
    OWN(Function, function, functions, handle);
    if (attribute != kMaxDynamicShared || value < 0 || value + kStaticShared > kMostShared)
        return kInvalidValue;
    return function->dynamic = value, 0;
}
int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream_handle,
                   void** parameters, void** extra) {
    BEGIN;
    OWN(Function, function, functions, handle);
    OWN(Stream, stream, streams, stream_handle);
    if (!modules.count(function->module))
        return violation(kInvalidHandle, "a kernel of a module that was unloaded");
    if (!grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535) return kInvalidValue;
    if (!block_x || !block_y || !block_z || block_x * block_y * block_z > 1024) return kInvalidValue;
    if (shared > function->dynamic) return kInvalidValue;
    // A buffer and its size, by key, and the end.
    const auto key = [extra](int i) { return reinterpret_cast<std::size_t>(extra[i]); };
    if (parameters || !extra || key(0) != 1 || key(2) != 2 || key(4) != 0) return kInvalidValue;
    parameter_bytes = int(*static_cast<std::size_t*>(extra[3]));
    if (stream->capturing) {
        // Kernels are loaded at their first launch.
        if (!function->loaded) return violation(kCaptureUnsupported, "a kernel's first launch is captured");
        return ++stream->captured, 0;
    }
    function->loaded = true;
    const char* const fatal = std::getenv("STUB_LOST_IN");
    // Kernels fail later than their launch.
    context->lost = fatal && function->name == fatal;
    return ++launches, 0;
}

int cuStreamBeginCapture_v2(void* handle, int mode) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    if (const int error = setting("STUB_CAPTURE", 0)) return error;
    if (stream->capturing) return violation(kCaptureInvalidated, "a capture within a capture");
    stream->capturing = true;
    stream->captured = 0;
    ++captures;
    strict_captures += mode != kRelaxed;
    return 0;
}
int cuStreamEndCapture(void* handle, void** graph) {
    BEGIN;
    OWN(Stream, stream, streams, handle);
    if (!stream->capturing) return violation(kCaptureInvalidated, "the end of a capture without a beginning");
    stream->capturing = false;
    if (--captures == 0) strict_captures = 0;
    auto* const made = new Graph{stream->captured};
    graphs.insert(made);
    return ++live_graphs, *graph = made, 0;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    BEGIN;
    if (!graphs.count(graph)) return violation(kInvalidHandle, "a graph that does not exist");
    return create(executable, new Executable{{context}}, executables, live_graphs);
}
int cuGraphDestroy(void* graph) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!graphs.count(graph)) return violation(kInvalidHandle, "cuGraphDestroy of no graph");
    return destroy(static_cast<Graph*>(graph), graphs, live_graphs);
}
int cuGraphExecDestroy(void* handle) {
    BEGIN;
    OWN(Executable, executable, executables, handle);
    return destroy(executable, executables, live_graphs);
}
int cuGraphLaunch(void* handle, void* stream_handle) {
    BEGIN;
    OWN(Executable, executable, executables, handle);
    OWN(Stream, stream, streams, stream_handle);
    (void)executable;
    if (stream->capturing) return violation(kCaptureUnsupported, "a graph within a capture");
    return ++launches, 0;
}
}

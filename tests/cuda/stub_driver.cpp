// A stand-in for libcuda.so.1 under PyCUDA itself: two devices in host memory whose kernels do nothing. It
// counts what is alive, and calls that need a current context and have none. Numbers of attributes and errors
// are those of cuda.h. Environment: STUB_INIT, STUB_CAPTURE, STUB_PEER (what these calls return),
// STUB_DEVICES, STUB_FREE_MIB.

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {

int live_streams, live_events, live_pinned, live_memory, live_graphs, contexts, launches, astray,
    parameter_bytes;

static thread_local std::size_t stack[64];
static thread_local int depth;

static bool no_context() {
    if (depth == 0) ++astray;
    return depth == 0;
}

constexpr int kNoDevice = 100, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201,
              kInvalidImage = 200;
// The attribute, and what a block may have on sm_90.
constexpr int kMaxDynamicShared = 8, kMostShared = 227 << 10;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;
constexpr std::size_t kTotal = std::size_t{8} << 30;

static int setting(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}
static std::size_t free_bytes() { return std::size_t(setting("STUB_FREE_MIB", 4096)) << 20; }

#define NEEDS_CONTEXT \
    if (no_context()) return kInvalidContext

static int create(void** handle, int& live) {
    NEEDS_CONTEXT;
    *handle = std::malloc(8);
    ++live;
    return 0;
}

static int destroy(void* handle, int& live) {
    NEEDS_CONTEXT;
    std::free(handle);
    --live;
    return 0;
}

int cuInit(unsigned) { return setting("STUB_INIT", 0); }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR", 0; }
int cuGetErrorString(int error, const char** text) {
    return *text = error == kOutOfMemory ? "out of memory"
                   : error == kNoDevice  ? "no CUDA-capable device"
                                         : "bad",
           0;
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
    *context = reinterpret_cast<void*>(std::size_t(device) + 1);
    return 0;
}

int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = reinterpret_cast<std::size_t>(context), 0; }
int cuCtxPopCurrent_v2(void** context) {
    NEEDS_CONTEXT;
    --depth;
    if (context) *context = reinterpret_cast<void*>(stack[depth]);
    return 0;
}
int cuCtxGetDevice(int* device) {
    NEEDS_CONTEXT;
    return *device = int(stack[depth - 1]) - 1, 0;
}
int cuCtxEnablePeerAccess(void*, unsigned) {
    return no_context() ? kInvalidContext : setting("STUB_PEER", 0);
}

int cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
    NEEDS_CONTEXT;
    return *available = free_bytes(), *total = kTotal, 0;
}
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes > free_bytes()) return kOutOfMemory;
    ++live_memory;
    *address = reinterpret_cast<unsigned long long>(std::calloc(bytes, 1));
    return 0;
}
int cuMemFree_v2(unsigned long long address) {
    return destroy(reinterpret_cast<void*>(address), live_memory);
}
int cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    if (bytes > free_bytes()) return kOutOfMemory;
    ++live_pinned;
    *address = std::malloc(bytes);
    return 0;
}
int cuMemFreeHost(void* address) { return destroy(address, live_pinned); }
int cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source, std::size_t bytes, void*) {
    NEEDS_CONTEXT;
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void* target, unsigned long long source, std::size_t bytes, void*) {
    NEEDS_CONTEXT;
    std::memcpy(target, reinterpret_cast<void*>(source), bytes);
    return 0;
}
int cuMemcpyPeerAsync(unsigned long long target, void*, unsigned long long source, void*, std::size_t bytes,
                      void*) {
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
    return 0;
}
int cuMemsetD8Async(unsigned long long target, unsigned char value, std::size_t bytes, void*) {
    NEEDS_CONTEXT;
    std::memset(reinterpret_cast<void*>(target), value, bytes);
    return 0;
}

int cuStreamCreate(void** stream, unsigned) { return create(stream, live_streams); }
int cuStreamDestroy_v2(void* stream) { return destroy(stream, live_streams); }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) { return create(event, live_events); }
int cuEventDestroy_v2(void* event) { return destroy(event, live_events); }
int cuEventRecord(void*, void*) { return no_context() ? kInvalidContext : 0; }
int cuEventSynchronize(void*) { return 0; }

int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void**) {
    static int live_modules;
    if (std::strncmp(static_cast<const char*>(image), "damaged", 7) == 0) return kInvalidImage;
    return create(module, live_modules);
}
int cuModuleUnload(void*) { return 0; }

// A kernel without static shared memory, and the dynamic one it may have.
struct Function {
    unsigned dynamic = 48 << 10;
};
int cuModuleGetFunction(void** function, void*, const char*) { return *function = new Function, 0; }
int cuFuncGetAttribute(int* value, int, void*) { return *value = 0, 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != kMaxDynamicShared || value > kMostShared) return kInvalidValue;
    static_cast<Function*>(function)->dynamic = value;
    return 0;
}
int cuLaunchKernel(void* function, unsigned, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void*, void** parameters,
                   void** extra) {
    NEEDS_CONTEXT;
    if (grid_y > 65535 || grid_z > 65535 || block_x * block_y * block_z > 1024) return kInvalidValue;
    if (shared > static_cast<Function*>(function)->dynamic) return kInvalidValue;
    // A buffer and its size, by key, and the end.
    const auto key = [extra](int i) { return reinterpret_cast<std::size_t>(extra[i]); };
    if (parameters || !extra || key(0) != 1 || key(2) != 2 || key(4) != 0) return kInvalidValue;
    parameter_bytes = int(*static_cast<std::size_t*>(extra[3]));
    return ++launches, 0;
}

int cuStreamBeginCapture_v2(void*, int) { return setting("STUB_CAPTURE", 0); }
int cuStreamEndCapture(void*, void** graph) { return *graph = &launches, 0; }
int cuGraphInstantiateWithFlags(void** executable, void*, unsigned long long) {
    return create(executable, live_graphs);
}
int cuGraphDestroy(void*) { return 0; }
int cuGraphExecDestroy(void* executable) { return destroy(executable, live_graphs); }
int cuGraphLaunch(void*, void*) { return ++launches, 0; }
}

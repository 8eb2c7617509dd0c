// A CUDA driver without a GPU, for tests (`gpu_on_cpu.py`). It checks what it is asked for against the driver's own
// header, with which it is compiled, and against what the cubin says of its kernels. A launch runs the host build of the
// same kernel, at once. Whatever a driver would refuse, or a GPU would hang on, is a fault: it is noted, and the call
// fails.
#define _GNU_SOURCE
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cuGetProcAddress

enum { MAX_KERNELS = 64, MAX_PARAMS = 16, MAX_RANKS = 72, LOG = 1 << 22 };
// Attributes of a kernel in a cubin, as `cuobjdump -elf` names them.
enum { EIFMT_SVAL = 4, EIATTR_MAX_THREADS = 0x05, EIATTR_KPARAM_INFO = 0x17 };

typedef struct {
  char name[64];
  unsigned params, size[MAX_PARAMS], max_threads;
  unsigned most_shared;  // bytes of dynamic shared memory that a launch may ask for
  int meets;             // waits for other ranks: takes a Transfer
  int (*host)(long, long, long, long, long, long, long, long, long, long, long, long, long);
} Kernel;

static struct {
  int version, sms, failed, refuses;
  void* host;
  Kernel kernels[MAX_KERNELS];
  unsigned count, given[MAX_PARAMS], num_given;
  char log[LOG];  // a line for every call
  size_t end;
} fake = {.version = 13000, .sms = 132, .num_given = ~0u};

static void note(const char* format, ...) {
  va_list args;
  va_start(args, format);
  const int size = vsnprintf(fake.log + fake.end, LOG - fake.end, format, args);
  va_end(args);
  if (size > 0 && fake.end + (size_t)size < LOG) fake.end += (size_t)size;
}
#define FAULT(...) (note("FAULT "), note(__VA_ARGS__), note("\n"), CUDA_ERROR_INVALID_VALUE)
#define CONTEXT \
  if (fake.failed) return CUDA_ERROR_LAUNCH_FAILED  // a kernel gave up: nothing works any more
// The context that is current in a thread; a new thread has none, whatever others have.
static __thread CUcontext current;
static int primary;
#define CURRENT(WHAT) \
  if (!current) return (void)FAULT("%s: no current context in this thread", WHAT), CUDA_ERROR_INVALID_CONTEXT

// For the tests.
const char* fake_log(void) { return fake.log; }
int fake_has_failed(void) { return fake.failed; }
void fake_clear(void) { fake.log[0] = 0, fake.end = 0; }
void fake_set(int version, int sms, const char* host) {
  fake.version = version, fake.sms = sms;
  fake.host = dlopen(host, RTLD_NOW);
}
// From now on it takes no cubin, as a driver takes none of a newer major version of CUDA.
void fake_refuse_cubins(void) { fake.refuses = 1; }
// What the next launch is given, which a driver can only read as the kernel says.
void fake_given(unsigned count, const unsigned* size) {
  fake.num_given = count;
  for (unsigned i = 0; i < count && i < MAX_PARAMS; ++i) fake.given[i] = size[i];
}

static CUresult init(unsigned flags) { return flags ? FAULT("cuInit(%u)", flags) : CUDA_SUCCESS; }

static CUresult device_get(CUdevice* device, int ordinal) {
  return ordinal ? FAULT("cuDeviceGet(%d)", ordinal) : (*device = 0, CUDA_SUCCESS);
}
static CUresult primary_context(CUcontext* context, CUdevice device) {
  if (device) return FAULT("cuDevicePrimaryCtxRetain of device %d", device);
  return *context = (CUcontext)&primary, CUDA_SUCCESS;
}
static CUresult get_current(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
static CUresult set_current(CUcontext context) {
  if (context && context != (CUcontext)&primary) return FAULT("cuCtxSetCurrent of no context");
  return current = context, CUDA_SUCCESS;
}

static CUresult error_name(CUresult error, const char** name) {
#define NAMED(ERROR) \
  if (error == ERROR) return *name = #ERROR, CUDA_SUCCESS
  NAMED(CUDA_ERROR_INVALID_VALUE);
  NAMED(CUDA_ERROR_INVALID_IMAGE);
  NAMED(CUDA_ERROR_INVALID_CONTEXT);
  NAMED(CUDA_ERROR_NOT_FOUND);
  NAMED(CUDA_ERROR_LAUNCH_FAILED);
  return CUDA_ERROR_INVALID_VALUE;
}

// The kernels of a cubin: a section `.nv.info.NAME` for each.
static CUresult load(CUlibrary* library, const void* code, CUjit_option* o, void** ov, unsigned n, CUlibraryOption* l,
                     void** lv, unsigned m) {
  CONTEXT;
  (void)o, (void)ov, (void)l, (void)lv;
  const char* const base = code;
  const Elf64_Ehdr* elf = code;
  if (fake.refuses) return CUDA_ERROR_INVALID_IMAGE;
  if (n || m) return FAULT("cuLibraryLoadData with %u and %u options", n, m);
  if (memcmp(elf->e_ident, ELFMAG, SELFMAG) || elf->e_machine != 190) return FAULT("cuLibraryLoadData of no cubin");
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(base + elf->e_shoff);
  const char* names = base + sections[elf->e_shstrndx].sh_offset;
  fake.count = 0;
  for (unsigned s = 0; s < elf->e_shnum; ++s) {
    const char* name = names + sections[s].sh_name;
    if (strncmp(name, ".nv.info.", 9) || fake.count == MAX_KERNELS) continue;
    Kernel k = {.max_threads = 1024, .most_shared = 48 << 10};
    snprintf(k.name, sizeof k.name, "%s", name + 9);
    const unsigned char *at = (const unsigned char*)base + sections[s].sh_offset, *end = at + sections[s].sh_size;
    while (at < end) {
      const unsigned format = at[0], attribute = at[1], size = at[2] | at[3] << 8;
      unsigned words[4] = {0};
      at += 4;
      if (format != EIFMT_SVAL) continue;
      memcpy(words, at, size < sizeof words ? size : sizeof words);
      at += size;
      if (attribute == EIATTR_MAX_THREADS) k.max_threads = words[0];
      if (attribute != EIATTR_KPARAM_INFO) continue;
      const unsigned ordinal = words[1] & 0xffff;  // then the offset
      if (ordinal >= MAX_PARAMS) return FAULT("%s has too many parameters for this driver", k.name);
      k.size[ordinal] = words[2] >> 18;
      if (ordinal >= k.params) k.params = ordinal + 1;
    }
    *(void**)&k.host = dlsym(fake.host, k.name);
    k.meets = !strcmp(k.name, "fssdp_gather") || !strncmp(k.name, "fssdp_reduce", 12) || !strcmp(k.name, "fssdp_synchronize");
    fake.kernels[fake.count++] = k;
  }
  note("load %u kernels\n", fake.count);
  return *library = (CUlibrary)&fake, CUDA_SUCCESS;
}

static CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  CONTEXT;
  if ((void*)library != (void*)&fake) return FAULT("cuLibraryGetKernel of no library");
  for (unsigned i = 0; i < fake.count; ++i)
    if (!strcmp(fake.kernels[i].name, name)) return *kernel = (CUkernel)&fake.kernels[i], CUDA_SUCCESS;
  return note("no kernel %s\n", name), CUDA_ERROR_NOT_FOUND;
}

static CUresult set_attribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
  CONTEXT;
  Kernel* k = (Kernel*)kernel;
  if (k < fake.kernels || k >= fake.kernels + fake.count || device) return FAULT("cuKernelSetAttribute of no kernel");
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > 227 << 10)
    return FAULT("cuKernelSetAttribute %d to %d", (int)attribute, value);
  return k->most_shared = (unsigned)value, CUDA_SUCCESS;
}

// What waits for others, or must not be waited for, has no place on a stream that waits for all.
static int is_default(CUstream stream) { return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD; }

// What every launch is checked for, of so many blocks and threads in all; 0 when all is well.
static CUresult check(const Kernel* k, unsigned blocks, unsigned threads, unsigned shared, CUstream stream) {
  if (k < fake.kernels || k >= fake.kernels + fake.count) return FAULT("a launch of no kernel");
  note("launch %s blocks=%u threads=%u shared=%u stream=%p\n", k->name, blocks, threads, shared, stream);
  if (!blocks || !threads) return FAULT("%s: an empty grid or block", k->name);
  if (threads > k->max_threads) return FAULT("%s: %u threads, it allows %u", k->name, threads, k->max_threads);
  if (shared > k->most_shared) return FAULT("%s: %u bytes of shared memory, it allows %u", k->name, shared, k->most_shared);
  if (k->meets && blocks > (unsigned)fake.sms)
    return FAULT("%s: %u blocks wait for each other on %d SMs", k->name, blocks, fake.sms);
  if (!k->host) return FAULT("%s: no such function in the host build", k->name);
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, CUstream stream, void** params, void** extra) {
  CONTEXT;
  CURRENT("cuLaunchKernel");
  const Kernel* k = (const Kernel*)f;
  const unsigned given = fake.num_given;
  fake.num_given = ~0u;
  const CUresult refused = check(k, gx * gy * gz, bx * by * bz, shared, stream);
  if (refused) return refused;
  if (extra) return FAULT("%s: extra arguments", k->name);
  if (given != k->params) return FAULT("%s: %d arguments, it takes %u", k->name, (int)given, k->params);
  for (unsigned i = 0; i < given; ++i)
    if (fake.given[i] != k->size[i])
      return FAULT("%s: argument %u has %u bytes, it takes %u", k->name, i, fake.given[i], k->size[i]);
  if (k->meets && is_default(stream)) return FAULT("%s: on the default stream", k->name);
  long a[MAX_PARAMS] = {0};
  for (unsigned i = 0; i < given; ++i) memcpy(a + i, params[i], k->size[i]);
  if (k->meets && given == 3) a[3] = gx < 2 ? gx : 2, a[4] = 1;  // the host's blocks and threads
  // A C function ignores arguments that it does not take.
  const int failed = k->host(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
  if (k->meets && failed) fake.failed = 1;
  return CUDA_SUCCESS;
}

// Ranks of one launch, each with its own blocks: they wait for each other, so each has a thread here.
typedef struct {
  const Kernel* kernel;
  long argument[5];
  int failed;
} Rank;
static void* run_rank(void* of) {
  Rank* r = of;
  const long* a = r->argument;
  r->failed = r->kernel->host(a[0], a[1], a[2], a[3], a[4], 0, 0, 0, 0, 0, 0, 0, 0);
  return NULL;
}

static CUresult launch_cooperative(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void** params) {
  CONTEXT;
  const Kernel* k = (const Kernel*)f;
  if (k < fake.kernels || k >= fake.kernels + fake.count) return FAULT("cuLaunchCooperativeKernel of no kernel");
  // tests alone launch so, and by no call that notes sizes
  const CUresult refused = check(k, gx * gy * gz, bx * by * bz, shared, stream);
  if (refused) return refused;
  if (!k->meets) return FAULT("%s: ranks of one launch do not meet by it", k->name);
  if (gz != 1 || by != 1 || bz != 1 || gy > MAX_RANKS) return FAULT("%s: grid or block", k->name);
  unsigned (*size_of_transfer)(void);
  *(void**)&size_of_transfer = dlsym(fake.host, "fssdp_size_of_transfer");
  Rank ranks[MAX_RANKS];
  pthread_t threads[MAX_RANKS];
  for (unsigned y = 0; y < gy; ++y) {
    ranks[y] = (Rank){.kernel = k, .argument = {0, 0, 0, gx < 2 ? gx : 2, 1}};
    for (unsigned i = 0; i < k->params; ++i) {
      ranks[y].argument[i] = 0;
      memcpy(ranks[y].argument + i, params[i], k->size[i]);
    }
    ranks[y].argument[0] += (long)y * size_of_transfer();
    if (pthread_create(threads + y, NULL, run_rank, ranks + y)) abort();
  }
  for (unsigned y = 0; y < gy; ++y) {
    pthread_join(threads[y], NULL);
    if (ranks[y].failed) fake.failed = 1;
  }
  return CUDA_SUCCESS;
}

static CUresult proc_address(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  *function = NULL;
  if (flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) return FAULT("cuGetProcAddress: flags %d", (int)flags);
  if (version > fake.version) return CUDA_ERROR_INVALID_VALUE;
  // The header has a type for every version of a function: the compiler compares.
#define ENTRY(NAME, SINCE, FUNCTION)                                                      \
  if (!strcmp(name, #NAME)) {                                                             \
    const PFN_##NAME##_v##SINCE typed = FUNCTION;                                         \
    if (SINCE <= version) *(PFN_##NAME##_v##SINCE*)function = typed;                      \
    found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT; \
  }
  ENTRY(cuInit, 2000, init)
  ENTRY(cuGetErrorName, 6000, error_name)
  ENTRY(cuDeviceGet, 2000, device_get)
  ENTRY(cuDevicePrimaryCtxRetain, 7000, primary_context)
  ENTRY(cuCtxGetCurrent, 4000, get_current)
  ENTRY(cuCtxSetCurrent, 4000, set_current)
  ENTRY(cuLibraryLoadData, 12000, load)
  ENTRY(cuLibraryGetKernel, 12000, get_kernel)
  ENTRY(cuKernelSetAttribute, 12000, set_attribute)
  ENTRY(cuLaunchKernel, 4000, launch)
  ENTRY(cuLaunchCooperativeKernel, 9000, launch_cooperative)
  ENTRY(cuGetProcAddress, 12000, proc_address)
  if (status) *status = found;
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  return proc_address(name, function, version, flags, status);
}

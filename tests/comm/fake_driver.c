/* Stands in for libcuda.so.1 as far as batches of copies go. Like the driver it has no function of a version that is
   newer than itself (cuGetProcAddress: CUDA_ERROR_INVALID_VALUE), and CUDA 13's cuMemcpyBatchAsync has no failIdx. */

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };

static int version(void) { return atoi(getenv("FAKE_DRIVER_VERSION")); }

static int unknown(void) { return NOT_FOUND; }

int cuInit(unsigned flags) { return SUCCESS; }

int cuDriverGetVersion(int *value) {
  *value = version();
  return SUCCESS;
}

static int batch(unsigned long long *to, unsigned long long *from, size_t *bytes, size_t count, void *attributes,
                 size_t *first, size_t attribute_count, void *stream) {
  if (stream == NULL || attribute_count != 1 || first[0] != 0) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) memcpy((void *)to[i], (void *)from[i], bytes[i]);
  return SUCCESS;
}

static int batch_of_12(unsigned long long *to, unsigned long long *from, size_t *bytes, size_t count, void *attributes,
                       size_t *first, size_t attribute_count, size_t *failed, void *stream) {
  *failed = (size_t)-1;
  return batch(to, from, bytes, count, attributes, first, attribute_count, stream);
}

int cuGetProcAddress_v2(const char *name, void **function, int asked, unsigned long long flags, int *found) {
  *function = NULL;
  if (found) *found = 1; /* not found */
  if (asked > version()) return INVALID_VALUE;
  *function = (void *)unknown;
  if (!strcmp(name, "cuInit")) *function = (void *)cuInit;
  if (!strcmp(name, "cuDriverGetVersion")) *function = (void *)cuDriverGetVersion;
  if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
  if (!strcmp(name, "cuMemcpyBatchAsync"))
    *function = asked >= 13000 ? (void *)batch : asked >= 12080 ? (void *)batch_of_12 : NULL;
  if (found) *found = *function ? 0 : 1;
  return SUCCESS;
}

int cuGetProcAddress(const char *name, void **function, int asked, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, asked, flags, NULL);
}

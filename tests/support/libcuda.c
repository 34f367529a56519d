/* In the place of the CUDA driver: Triton's launchers call it, nothing runs. It counts launches, and refuses descriptors
 * that break the rules of cuTensorMapEncodeTiled: docs.nvidia.com/cuda/cuda-driver-api, the page on tensor map objects.
 */
#include <stdint.h>
#include <stddef.h>

typedef int Result;
long launches, descriptors;

#define NOTHING(name) Result name(void) { return 0; }
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuDeviceGet)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleLoadData)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuTensorMapEncodeIm2col)

Result cuCtxGetCurrent(void **context) { *context = &launches; return 0; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 1024; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &launches; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
Result cuGetErrorString(int error, const char **text) { *text = "refused"; return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = &launches; return 0; }
Result cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
Result cuLaunchKernelEx(void) { launches++; return 0; }

Result cuTensorMapEncodeTiled(void *map, int dtype, uint32_t rank, void *address, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    static const uint32_t itemsize[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, row[] = {1 << 20, 32, 64, 128};
    uint32_t bytes = box[0] * itemsize[dtype];
    descriptors++;
    if (rank < 1 || rank > 5 || (uintptr_t)address % 16 || bytes % 16 || bytes > row[swizzle])
        return 1;
    for (uint32_t i = 0; i < rank; i++)
        if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1)
            return 1;
    for (uint32_t i = 0; i + 1 < rank; i++)
        if (strides[i] % 16 || strides[i] >= 1ull << 40 || strides[i] < sizes[i])
            return 1;
    return 0;
}

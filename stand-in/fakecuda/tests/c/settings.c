/* Prints what the settings made of the driver: the code of cuInit, version, devices, codes of calls. */
#include "driver.h"

int cuDeviceGetName(char *, int, int);
int cuDeviceTotalMem_v2(size_t *, int);

int main(void)
{
    char name[64] = "";
    int version = 0, devices = 0;
    size_t bytes = 0;
    ptr made;
    void *pool, *context;
    pool_props of;
    memset(&of, 0, sizeof of);
    of.type = of.at.type = 1;
    int code = cuInit(0);
    cuDriverGetVersion(&version);
    printf("init %d version %d", code, version);
    if (code)
        return 0;
    cuDeviceGetCount(&devices);
    cuDeviceGetName(name, sizeof name, devices - 1);
    cuDeviceTotalMem_v2(&bytes, devices - 1);
    printf(" devices %d name %s bytes %zu", devices, name, bytes);
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    printf(" alloc");
    for (int i = 0; i < 4; i++)
        printf(" %d", cuMemAlloc_v2(&made, 4096));
    printf(" pool %d", cuMemPoolCreate(&pool, &of));
    return 0;
}

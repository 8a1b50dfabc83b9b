// A CUDA driver that counts: each call that torch's CUDA runtime makes is a line "PID NAME" in
// $STUB_LOG. It has no device: cuInit answers CUDA_ERROR_NO_DEVICE.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int said(const char *name, int answer) {
  const char *path = getenv("STUB_LOG");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (log) {
    fprintf(log, "%d %s\n", (int)getpid(), name);
    fclose(log);
  }
  return answer;
}

int cuInit(unsigned flags) { return said("cuInit", 100); }
int cuDriverGetVersion(int *version) { *version = 13000; return said("cuDriverGetVersion", 0); }
int cuDeviceGetCount(int *count) { *count = 0; return said("cuDeviceGetCount", 0); }
static int unsupported(void) { return 801; }

// The runtime asks for all other calls once, when it is loaded: their addresses only.
int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags, int *status) {
  if (status) *status = 0;
  *address = !strcmp(name, "cuInit") ? (void *)cuInit
           : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
           : !strcmp(name, "cuDeviceGetCount") ? (void *)cuDeviceGetCount
           : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2
           : (void *)unsupported;
  return 0;
}

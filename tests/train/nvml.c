/* A stand-in for libnvidia-ml with one GPU that tells everything but its memory clock. */
typedef void *device;
static unsigned long long meter = 1000;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, device *found) { *found = (void *)uuid; return 0; }
int nvmlDeviceGetPowerUsage(device one, unsigned int *milliwatts) { *milliwatts = 312000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(device one, unsigned long long *millijoules) {
    *millijoules = meter;
    meter += 500;
    return 0;
}
int nvmlDeviceGetClockInfo(device one, int kind, unsigned int *mhz) {
    *mhz = 1980;
    return kind == 1 ? 0 : 3; /* 3: not supported */
}
int nvmlDeviceGetTemperature(device one, int kind, unsigned int *celsius) { *celsius = 61; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(device one, unsigned long long *mask) { *mask = 0x4 | 0x20; return 0; }
const char *nvmlErrorString(int code) { return "not supported"; }

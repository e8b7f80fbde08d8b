// Control for racecheck: one thread passes an int32 to 128 threads through shared memory and reuses it after their `empty` mbarrier.
//   nvcc -arch=sm_90a -o control racecheck_control.cu && compute-sanitizer --tool racecheck ./control
// With a barrier among the 128 threads and one arrival, racecheck reports 19 errors; with an arrival of each thread, none.
#include <cstdint>
#include <cstdio>

__device__ uint32_t address(uint64_t* barrier) { return (uint32_t)__cvta_generic_to_shared(barrier); }

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, int phase) {
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }" ::"r"(address(barrier)),
               "r"(phase)
               : "memory");
}

__global__ void tell(int* out, bool each) {
  __shared__ int number;
  __shared__ uint64_t full, empty;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&full)), "r"(1));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&empty)), "r"(each ? 128 : 1));
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < 20; i++) {
      wait(&empty, (i & 1) ^ 1);
      number = i;
      arrive(&full);
    }
  if (threadIdx.x >= 32) {
    int sum = 0;
    for (int i = 0; i < 20; i++) {
      wait(&full, i & 1);
      sum += number;
      if (!each) asm volatile("bar.sync 1, 128;" ::: "memory");
      if (each || threadIdx.x == 32) arrive(&empty);
    }
    out[threadIdx.x - 32] = sum;
  }
}

int main() {
  int* out;
  cudaMalloc(&out, 128 * sizeof(int));
  for (bool each : {false, true}) {
    tell<<<1, 160>>>(out, each);
    cudaDeviceSynchronize();
    printf("%s gives the place back: done\n", each ? "each" : "one");
  }
}

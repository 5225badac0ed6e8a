/* SPDX-License-Identifier: Apache-2.0
 *
 * thread_block.cuh: a thread block of a GPU on one thread of the processor. Each of its lanes is a
 * fiber; a lane runs until it has to wait for others. Which warp runs next is drawn by lot, and in
 * some runs one warp is kept back or preferred, for what goes wrong only then.
 *
 * As strict as the machine, or stricter: shared memory holds anything at first, asynchronous
 * copies come as late as they may or at any time before, barriers count whoever comes. What is
 * undefined there (an address off its alignment, lanes of a warp in different collectives) ends
 * the test. Not as strict: memory is the same for all at once, so that a shuffle orders it as
 * __syncwarp does, and thread blocks run one after the other.
 */
#ifndef KVF_TESTS_GPU_EMULATE_THREAD_BLOCK_CUH
#define KVF_TESTS_GPU_EMULATE_THREAD_BLOCK_CUH

#include <stddef.h>
#include <stdint.h>
#include <string>

struct kvf_gpu_work;

/* CUDA's names for where the lane that runs is. */
struct emulate_index {
    uint32_t x;
};

extern emulate_index threadIdx;
extern emulate_index blockIdx;
extern emulate_index gridDim;
extern emulate_index blockDim;

namespace emulate
{

/* --- for who launches --- */

using kernel_function = void (*)(const kvf_gpu_work &work, uint32_t tensors);

struct launch {
    kernel_function kernel;
    const kvf_gpu_work *work;
    uint32_t tensors;
    uint32_t n_blocks;
    uint32_t n_threads; /* whole warps */
    uint32_t shared_bytes;
};

/* Empty: the thread block has come to its end; else who waits for what, for ever. */
std::string run_thread_block(const launch &what, uint32_t block, uint32_t seed);

/* So many groups of copies more than a lane allows may come after it has waited for them. */
extern uint32_t late_groups;

/* --- for the lane that runs --- */

constexpr uint32_t words_max = 6;

/* What a lane gives to a collective: the fragments of a product are the most. */
struct lane_words {
    uint32_t word[words_max];
};

/* Wait for the other lanes of the warp. Returns the 32 lanes' words, good until the next one. */
const lane_words *exchange(const lane_words &mine);

/* Barriers count lanes; whoever comes as the last of n lets all go. */
void arrive(uint32_t barrier, uint32_t n);
void await(uint32_t barrier, uint32_t n);
void await_all(); /* at barrier 0 */

void start_copy(uint32_t to, const void *from, uint32_t bytes);
void commit_copies();
void await_copies(uint32_t behind);

/* The memory that the launch asked for, and the short form of an address in it or in a static
 * array. */
uint8_t *shared_memory();
uint32_t shared_address(const void *at);
uint32_t load_shared(uint32_t at);

/* End the test if an address is not a multiple of so many bytes. */
void check_alignment(const void *address, size_t bytes);

} /* namespace emulate */

#endif /* KVF_TESTS_GPU_EMULATE_THREAD_BLOCK_CUH */

/* SPDX-License-Identifier: Apache-2.0
 *
 * thread_block.cc: see thread_block.cuh.
 */
#include "tests/gpu/emulate/thread_block.cuh"

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

emulate_index threadIdx;
emulate_index blockIdx;
emulate_index gridDim;
emulate_index blockDim;

namespace emulate
{

uint32_t late_groups;

namespace
{

constexpr uint32_t warp_lanes = 32;
constexpr uint32_t warps_max = 32;
constexpr uint32_t barriers = 16;
constexpr size_t stack_bytes = 64 << 10;
constexpr uint32_t shared_bytes_max = 256 << 10;
constexpr uint32_t guard_bytes = 256; /* behind the shared memory that was asked for */
constexpr uint8_t guard_byte = 0xa5;

enum class lane_state {
    ready,
    in_collective,
    at_barrier,
    done
};

struct copy {
    uint8_t *to;
    const void *from;
    uint32_t bytes;
};

using copy_group = std::vector<copy>;

struct lane {
    std::unique_ptr<uint8_t[]> stack;
    void *stack_pointer;
    lane_state state;
    uint32_t thread;
    uint32_t barrier; /* at which it is */
    uint32_t n_collectives;
    copy_group started;
    std::deque<copy_group> groups;
};

alignas(128) uint8_t shared[shared_bytes_max];
std::vector<lane> lanes;
lane *running;
void *scheduler_stack_pointer;
const launch *launched;
uint32_t barrier_counts[barriers];
/* Of this collective of each warp and of the one before, which some lanes may be reading yet. */
lane_words collectives[2][warps_max][warp_lanes];
std::mt19937 lots;

[[noreturn]] void refuse(const char *text)
{
    printf("thread block %u, lane %u: %s\n", blockIdx.x, threadIdx.x, text);
    fflush(stdout);
    abort();
}

} /* namespace */

/* -------------------------------------------------------------------------------------------------
 * Fibers
 */

/* Keep the registers that a function must not change on the stack, *from becomes its pointer; go on
 * where `to` is one. */
extern "C" void kvf_emulate_switch(void **from, void *to);

asm(R"(
.text
.globl kvf_emulate_switch
.type kvf_emulate_switch, @function
kvf_emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size kvf_emulate_switch, . - kvf_emulate_switch
)");

namespace
{

/* Let others run until the lane is ready again. */
void wait_as(lane_state state)
{
    running->state = state;
    kvf_emulate_switch(&running->stack_pointer, scheduler_stack_pointer);
}

void run_lane()
{
    launched->kernel(*launched->work, launched->tensors);
    for (;;) {
        wait_as(lane_state::done);
    }
}

/* A stack that looks as if run_lane had been about to begin: its address below what a call would
 * have left, and six registers. */
void start_lane(lane *one, uint32_t thread)
{
    if (one->stack == nullptr) {
        one->stack.reset(new uint8_t[stack_bytes]);
    }
    uint64_t top = (reinterpret_cast<uint64_t>(one->stack.get()) + stack_bytes) & ~(uint64_t)63;
    void **at = reinterpret_cast<void **>(top);
    *--at = nullptr;
    *--at = reinterpret_cast<void *>(run_lane);
    for (int i = 0; i < 6; i++) {
        *--at = nullptr;
    }
    one->stack_pointer = at;
    one->state = lane_state::ready;
    one->thread = thread;
    one->n_collectives = 0;
    one->started.clear();
    one->groups.clear();
}

void resume(lane *one)
{
    running = one;
    threadIdx.x = one->thread;
    kvf_emulate_switch(&scheduler_stack_pointer, one->stack_pointer);
}

} /* namespace */

/* -------------------------------------------------------------------------------------------------
 * What lanes do
 */
namespace
{

void land(copy_group *group)
{
    for (const copy &one : *group) {
        memcpy(one.to, one.from, one.bytes);
    }
    group->clear();
}

/* Copies come in any order. */
void land_some()
{
    if (!running->groups.empty() && lots() % 4 == 0) {
        land(&running->groups[lots() % running->groups.size()]);
    }
}

} /* namespace */

const lane_words *exchange(const lane_words &mine)
{
    uint32_t warp = running->thread / warp_lanes;
    lane_words *all = collectives[running->n_collectives++ % 2][warp];
    all[running->thread % warp_lanes] = mine;
    wait_as(lane_state::in_collective);
    land_some();
    return all;
}

void arrive(uint32_t barrier, uint32_t n)
{
    if (barrier >= barriers || n % warp_lanes != 0) {
        refuse("no such barrier");
    }
    if (++barrier_counts[barrier] < n) {
        return;
    }
    barrier_counts[barrier] = 0;
    for (lane &other : lanes) {
        if (other.state == lane_state::at_barrier && other.barrier == barrier) {
            other.state = lane_state::ready;
        }
    }
}

void await(uint32_t barrier, uint32_t n)
{
    arrive(barrier, n);
    if (barrier_counts[barrier] != 0) {
        running->barrier = barrier;
        wait_as(lane_state::at_barrier);
    }
}

void await_all()
{
    await(0, (uint32_t)lanes.size());
}

/* Static arrays are on either side of the memory, and nearer than 2 GiB. */
void start_copy(uint32_t to, const void *from, uint32_t bytes)
{
    uint8_t *address = shared + (int32_t)to;
    check_alignment(address, bytes);
    check_alignment(from, bytes);
    running->started.push_back({address, from, bytes});
}

void commit_copies()
{
    running->groups.push_back(running->started);
    running->started.clear();
    land_some();
}

void await_copies(uint32_t behind)
{
    while (running->groups.size() > behind + late_groups) {
        land(&running->groups.front());
        running->groups.pop_front();
    }
}

uint8_t *shared_memory()
{
    return shared;
}

uint32_t shared_address(const void *at)
{
    return (uint32_t)(static_cast<const uint8_t *>(at) - shared);
}

uint32_t load_shared(uint32_t at)
{
    const uint8_t *address = shared + (int32_t)at;
    check_alignment(address, sizeof(uint32_t));
    uint32_t word;
    memcpy(&word, address, sizeof(word));
    return word;
}

void check_alignment(const void *address, size_t bytes)
{
    if (reinterpret_cast<uint64_t>(address) % bytes != 0) {
        refuse("an address is off its alignment");
    }
}

/* -------------------------------------------------------------------------------------------------
 * The scheduler
 */
namespace
{

/* How the warps of one run are chosen. */
struct bias {
    enum {
        none,
        steps,
        keep_back,
        prefer,
        kinds
    } kind;
    uint32_t warp; /* that is kept back or preferred */

    explicit bias(uint32_t n_warps)
        : kind((decltype(kind))(lots() % kinds)), warp((uint32_t)lots() % n_warps)
    {
    }

    uint32_t choose(const std::vector<uint32_t> &ready) const
    {
        uint32_t chosen = ready[lots() % ready.size()];
        bool is_rare = lots() % 128 == 0; /* for all to come to an end */
        if (kind == prefer && !is_rare && std::count(ready.begin(), ready.end(), warp) != 0) {
            return warp;
        }
        while (kind == keep_back && !is_rare && ready.size() > 1 && chosen == warp) {
            chosen = ready[lots() % ready.size()];
        }
        return chosen;
    }

    /* How far a warp runs, in collectives. */
    uint32_t n_steps() const
    {
        return kind == steps ? 1 : 1 + (uint32_t)lots() % 32;
    }
};

uint32_t count_lanes(uint32_t warp, lane_state state)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < warp_lanes; i++) {
        n += lanes[warp * warp_lanes + i].state == state ? 1 : 0;
    }
    return n;
}

/* Run the warp's lanes that can, to where they wait. False: it has to wait for other warps. */
bool run_warp(uint32_t warp)
{
    lane *first = &lanes[warp * warp_lanes];
    uint32_t turn = (uint32_t)lots(); /* the order of the lanes */
    for (uint32_t i = 0; i < warp_lanes; i++) {
        lane *one = &first[(i ^ turn) % warp_lanes];
        if (one->state == lane_state::ready) {
            resume(one);
        }
    }
    if (count_lanes(warp, lane_state::in_collective) != warp_lanes) {
        return count_lanes(warp, lane_state::ready) != 0;
    }
    for (uint32_t i = 0; i < warp_lanes; i++) {
        if (first[i].n_collectives != first->n_collectives) {
            refuse("lanes of a warp are in different collectives");
        }
        first[i].state = lane_state::ready;
    }
    return true;
}

std::string describe_wait()
{
    std::string text;
    for (uint32_t warp = 0; warp < lanes.size() / warp_lanes; warp++) {
        const lane &first = lanes[warp * warp_lanes];
        text += " warp " + std::to_string(warp) +
                (first.state == lane_state::done ? " is done"
                 : first.state == lane_state::at_barrier
                     ? " waits at barrier " + std::to_string(first.barrier)
                     : " waits in a collective");
    }
    return text;
}

std::string run_warps(uint32_t n_warps)
{
    const bias by(n_warps);
    for (;;) {
        std::vector<uint32_t> ready;
        uint32_t n_done = 0;
        for (uint32_t warp = 0; warp < n_warps; warp++) {
            n_done += count_lanes(warp, lane_state::done);
            if (count_lanes(warp, lane_state::ready) != 0) {
                ready.push_back(warp);
            }
        }
        if (ready.empty()) {
            return n_done == n_warps * warp_lanes ? "" : describe_wait();
        }
        uint32_t warp = by.choose(ready);
        for (uint32_t n = by.n_steps(); n > 0 && run_warp(warp); n--) {
        }
    }
}

void fill_shared(uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++) {
        shared[i] = (uint8_t)lots();
    }
    memset(shared + bytes, guard_byte, guard_bytes);
}

void check_end(uint32_t shared_bytes)
{
    for (uint32_t i = 0; i < guard_bytes; i++) {
        if (shared[shared_bytes + i] != guard_byte) {
            refuse("more shared memory is used than asked for");
        }
    }
    for (const lane &one : lanes) {
        if (!one.started.empty()) {
            refuse("copies of no group at the end");
        }
    }
}

} /* namespace */

std::string run_thread_block(const launch &what, uint32_t block, uint32_t seed)
{
    if (what.n_threads % warp_lanes != 0 || what.n_threads > warps_max * warp_lanes ||
        what.shared_bytes + guard_bytes > shared_bytes_max) {
        refuse("no thread block has such a shape");
    }
    launched = &what;
    blockIdx.x = block;
    gridDim.x = what.n_blocks;
    blockDim.x = what.n_threads;
    lots.seed(seed);
    fill_shared(what.shared_bytes);
    memset(barrier_counts, 0, sizeof(barrier_counts));
    lanes.resize(what.n_threads);
    for (uint32_t i = 0; i < what.n_threads; i++) {
        start_lane(&lanes[i], i);
    }
    std::string stuck = run_warps(what.n_threads / warp_lanes);
    check_end(what.shared_bytes);
    return stuck;
}

} /* namespace emulate */

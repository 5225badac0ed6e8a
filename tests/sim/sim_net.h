/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_net.h: the network between simulated nodes, in virtual time. It stands in the place of
 * transport/transport_ucx.c: what the daemons call is transport_ucx.h, what they may count on is
 * kept (memory is not touched after its DONE, a fetch ends by its deadline), and all else is as bad
 * as the seed wants: delays, loss, swapped messages, wrong bits, answers to another question,
 * partitions, connections that break with a word or without one.
 */
#ifndef KVF_TESTS_SIM_NET_H
#define KVF_TESTS_SIM_NET_H

#include "base/random.h"
#include "transport/transport_ucx.h"

enum sim_net_limits {
    SIM_NET_NODES = 4,
    SIM_NET_PORT = 1000, /* of node 0 */
};

/* What goes wrong now: one message in so many; 0: none. */
struct sim_net_faults {
    uint32_t lose_in, swap_in, late_in, flip_in, mix_up_in;
};

struct sim_net_counts {
    uint64_t lost, swapped, late, flipped, mixed_up, cut, timeouts, downs, pieces, full;
};

/* One network for all nodes of this process. seed: of everything that happens in it. */
void sim_net_begin(uint64_t seed);
void sim_net_end(void);
/* Let everything happen that is due by then. */
void sim_net_advance(uint64_t now_ns);
/* When something is due next; UINT64_MAX: never. */
uint64_t sim_net_next_ns(void);
void sim_net_faults_set(const struct sim_net_faults *faults);
/* Nothing goes from a to b (nor back, if both). until_ns in the past: it does again. */
void sim_net_cut(uint32_t a, uint32_t b, bool both, uint64_t until_ns);
const struct sim_net_counts *sim_net_counts(void);
/* The next close of this node's network tells nobody. */
void sim_net_die_silently(uint32_t node);

#endif /* KVF_TESTS_SIM_NET_H */

/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_nodes.c: several nodes with one clock and a network between them. Each is a whole simulation
 * of its own, with drives that fail, clients that break rules and a daemon that is killed; what is
 * new here is what goes wrong between them, and what they must agree on once nothing does.
 */
#include "tests/sim/sim.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "agent/peers.h"

#define SPIN_TURNS 5000 /* without progress of time */
#define QUIET_NS                                                                                   \
    (25 * KVF_NS_PER_S) /* after which all know all again: silence, a pause before the
                                         next try, a snapshot */
#define AGREE_TRIES 2000

/* ---- time ------------------------------------------------------------------------------------ */

static uint64_t now_of(const struct sim_world *world)
{
    uint64_t now_ns = 0;

    for (uint32_t i = 0; i < world->n; i++) {
        const struct sim *sim = world->nodes[i];

        now_ns = sim->now_ns > now_ns ? sim->now_ns : now_ns;
    }
    return now_ns;
}

static uint64_t next_of(const struct sim_world *world)
{
    uint64_t next_ns = sim_net_next_ns();

    for (uint32_t i = 0; i < world->n; i++) {
        const struct sim *sim = world->nodes[i];
        uint64_t node_ns = sim->agent != NULL ? sim_next_event_ns(sim) : UINT64_MAX;

        next_ns = node_ns < next_ns ? node_ns : next_ns;
    }
    return next_ns;
}

bool sim_nodes_advance(struct sim *sim, uint64_t ns)
{
    struct sim_world *world = sim->world;
    uint64_t now_ns = now_of(world);
    uint64_t target_ns = now_ns + ns;
    uint32_t turns = 0;
    bool goes_on = true;

    while (now_ns < target_ns && goes_on) {
        uint64_t next_ns = next_of(world);

        next_ns = next_ns < now_ns ? now_ns : next_ns;
        turns = next_ns == now_ns ? turns + 1 : 0;
        if (turns > SPIN_TURNS) {
            sim_fail(sim, "a reactor spins: nothing happens, and it does not sleep");
        }
        now_ns = next_ns < target_ns ? next_ns : target_ns;
        sim_net_advance(now_ns);
        for (uint32_t i = 0; i < world->n; i++) {
            struct sim *node = world->nodes[i];

            if (node->agent == NULL) {
                continue; /* being made */
            }
            sim_time_set(node, now_ns > node->now_ns ? now_ns : node->now_ns);
            if (!sim_turn(node)) {
                goes_on = false; /* judged there: only who was told to end may */
            } else {
                sim_keep_house(node);
            }
        }
    }
    return goes_on;
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static uint32_t maybe(struct sim *sim)
{
    return sim_one_in(sim, 2) ? (uint32_t)sim_between(sim, 2, 60) : 0;
}

static void faults_act(struct sim_world *world)
{
    const struct sim_net_faults none = {0};
    struct sim_net_faults faults = {0};
    struct sim *sim = world->nodes[0];
    uint64_t now_ns = now_of(world);

    if (world->faults_end_ns != 0 && now_ns >= world->faults_end_ns) {
        sim_net_faults_set(&none);
        world->faults_end_ns = 0;
    }
    if (world->faults_end_ns == 0 && sim_one_in(sim, 800)) {
        faults.lose_in = maybe(sim);
        faults.swap_in = maybe(sim);
        faults.late_in = maybe(sim);
        faults.flip_in = maybe(sim);
        faults.mix_up_in = maybe(sim);
        sim_net_faults_set(&faults);
        world->faults_end_ns = now_ns + sim_between(sim, 20, 1500) * KVF_NS_PER_MS;
        sim_trace(sim, "network: one in %u lost, %u swapped, %u late, %u flipped, %u mixed up",
                  faults.lose_in, faults.swap_in, faults.late_in, faults.flip_in, faults.mix_up_in);
    }
    if (sim_one_in(sim, 2000)) {
        uint32_t a = (uint32_t)sim_below(sim, world->n);
        uint32_t b = (a + 1 + (uint32_t)sim_below(sim, world->n - 1)) % world->n;
        uint64_t end_ns = now_ns + sim_between(sim, 50, 9000) * KVF_NS_PER_MS;

        sim_net_cut(a, b, sim_one_in(sim, 2), end_ns);
        sim_trace(sim, "network: nothing from node %u to %u", a, b);
    }
}

void sim_nodes_step(struct sim_world *world)
{
    faults_act(world);
    sim_step(world->nodes[sim_below(world->nodes[0], world->n)]);
}

/* ---- what they know of each other ------------------------------------------------------------ */

uint8_t sim_nodes_ever(const struct sim *sim, const struct sim_block *block)
{
    uint8_t ever = 0;

    for (uint32_t i = 0; sim->world != NULL && i < sim->world->n; i++) {
        const struct sim *node = sim->world->nodes[i];

        if (node != NULL && node->blocks != NULL) {
            ever |= node->blocks[block - sim->blocks].ever;
        }
    }
    return ever;
}

static void count(struct sim *sim)
{
    const struct sim_net_counts *now = sim_net_counts();
    struct sim_net_counts *before = &sim->world->counted;

    sim->cover[SIM_COVER_net_lost] += now->lost - before->lost;
    sim->cover[SIM_COVER_net_swapped] += now->swapped - before->swapped;
    sim->cover[SIM_COVER_net_late] += now->late - before->late;
    sim->cover[SIM_COVER_net_flipped] += now->flipped - before->flipped;
    sim->cover[SIM_COVER_net_mixed_up] += now->mixed_up - before->mixed_up;
    sim->cover[SIM_COVER_net_cut] += now->cut - before->cut;
    sim->cover[SIM_COVER_net_full] += now->full - before->full;
    sim->cover[SIM_COVER_fetch_timeout] += now->timeouts - before->timeouts;
    sim->cover[SIM_COVER_link_down] += now->downs - before->downs;
    *before = *now;
}

void sim_nodes_audit(struct sim *sim)
{
    const struct kvf_metrics *metrics = &sim->agent->metrics;

    if (sim->world == NULL) {
        return;
    }
    count(sim);
    if (metrics->peer_corrupt_blocks > 0 && sim->world->counted.flipped == 0 &&
        sim->world->counted.mixed_up == 0) {
        sim_fail(sim, "node %u was given wrong bytes by a network that changes none", sim->node);
    }
}

static struct kvf_peer_link *link_to(struct sim *sim, const struct sim *far)
{
    for (uint32_t i = 0; i < KVF_NET_LINKS_MAX; i++) {
        struct kvf_peer_link *link = &sim->agent->peers->links[i];

        if (link->link != 0 && link->is_initiator && link->incarnation == far->agent->incarnation) {
            return link;
        }
    }
    return NULL;
}

static bool is_here(const struct kvf_agent *agent, const struct kvf_entry *entry)
{
    return entry->state == KVF_ENTRY_READY ||
           (entry->state == KVF_ENTRY_LOADING &&
            (kvf_entry_on_drive(entry) || kvf_entry_in_hbm(agent, entry)));
}

/* Does one node know what the other one has? */
static void check_hints(struct sim *sim, const struct sim *far, const struct kvf_peer_link *link)
{
    const struct kvf_hints *hints = &sim->agent->peers->hints;
    const struct kvf_index *index = &far->agent->index;
    const struct kvf_metrics *metrics = &sim->agent->metrics;
    uint64_t n_lacking = 0;

    for (uint32_t i = 0; i < SIM_NAMESPACES * SIM_CHAINS * SIM_CHUNKS * SIM_SHARDS_MAX; i++) {
        struct sim_block *block = &sim->blocks[i];
        uint32_t shard = i % SIM_SHARDS_MAX;
        const struct kvf_entry *entry;
        uint32_t bytes;
        bool is_said;
        bool is_there;

        if (!block->has_key_id) {
            continue; /* nobody has asked for it here */
        }
        entry = kvf_index_find(index, block->key_id, shard);
        is_there = entry != NULL && is_here(far->agent, entry);
        is_said = (kvf_hints_find(hints, block->key_id, shard, &bytes) >> link->source & 1) != 0;
        if (is_said && !is_there) {
            char text[200];

            sim_describe(sim, block, text, sizeof(text));
            sim_fail(sim, "node %u takes node %u to have what it has not: %s", sim->node, far->node,
                     text);
        }
        n_lacking += is_there && !is_said;
        sim->cover[SIM_COVER_hints_agree] += is_said;
    }
    /* a hint is also dropped for want of room, or when its fetch has failed */
    if (n_lacking > metrics->peer_stale_hints + metrics->peer_corrupt_blocks &&
        hints->dropped_count == 0) {
        sim_fail(sim, "node %u does not know of %llu blocks that node %u has", sim->node,
                 (unsigned long long)n_lacking, far->node);
    }
}

static void check_pair(struct sim *sim, const struct sim *far)
{
    for (uint32_t tries = 0; tries < AGREE_TRIES; tries++) {
        const struct kvf_peer_link *link = link_to(sim, far);

        /* it may have been a fetch that removed a hint, or a block that has just expired */
        if (link != NULL && link->learn == KVF_LEARN_LIVE &&
            link->number == far->agent->peers->log_next) {
            check_hints(sim, far, link);
            return;
        }
        (void)sim_nodes_advance(sim, KVF_NS_PER_MS);
    }
    sim_fail(sim, "node %u does not know what node %u has, though nothing is in the way", sim->node,
             far->node);
}

/* ---- the whole ------------------------------------------------------------------------------- */

void sim_nodes_open(struct sim_world *world)
{
    sim_net_begin(world->nodes[0]->seed + (3ull << 40));
    memset(world->id_key, 0x5a, sizeof(world->id_key));
    world->key_fd = memfd_create("cluster key", MFD_CLOEXEC);
    if (world->key_fd < 0 || write(world->key_fd, world->id_key, sizeof(world->id_key)) !=
                                 (ssize_t)sizeof(world->id_key)) {
        sim_fail(world->nodes[0], "no memory for a key");
    }
    for (uint32_t i = 0; i < world->n; i++) {
        world->nodes[i]->world = world;
        world->nodes[i]->node = i;
    }
    for (uint32_t i = 0; i < world->n; i++) {
        sim_open(world->nodes[i]);
    }
}

void sim_nodes_close(struct sim_world *world)
{
    const struct sim_net_faults none = {0};

    sim_net_faults_set(&none);
    for (uint32_t a = 0; a < world->n; a++) {
        sim_faults_end(world->nodes[a]);
        for (uint32_t b = 0; b < world->n; b++) {
            sim_net_cut(a, b, false, 0);
        }
    }
    (void)sim_nodes_advance(world->nodes[0], QUIET_NS);
    for (uint32_t a = 0; a < world->n; a++) {
        for (uint32_t b = 0; b < world->n; b++) {
            if (a != b) {
                check_pair(world->nodes[a], world->nodes[b]);
            }
        }
    }
    for (uint32_t i = 0; i < world->n; i++) {
        for (uint32_t k = 0; k < world->nodes[i]->shape.n_clients; k++) {
            sim_client_detach(world->nodes[i], &world->nodes[i]->clients[k]);
        }
    }
    for (uint32_t i = 0; i < world->n; i++) {
        sim_leave(world->nodes[i]);
        sim_nodes_audit(world->nodes[i]);
    }
    for (uint32_t i = 0; i < world->n; i++) {
        sim_free(world->nodes[i]);
    }
    sim_net_end();
    (void)close(world->key_fd);
}

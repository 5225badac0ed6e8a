/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_step.c: who does what in one step. A step is one act of one client, or of the world, and a
 * turn of the daemon.
 */
#include "tests/sim/sim.h"

/* More requests than ring and credits hold, before the daemon looks once. */
static void burst(struct sim *sim, struct sim_client *client)
{
    bool is_small = sim_one_in(sim, 2);

    for (int i = 0; i < 90; i++) {
        if (is_small) {
            sim_request_plain(sim, client, KVF_OP_NOP);
        } else {
            sim_request_read(sim, client, client->is_scheduler ? KVF_OP_LOOKUP : KVF_OP_GET);
        }
        sim_lease_release_due(sim, client, false);
    }
}

static void rare(struct sim *sim, struct sim_client *client)
{
    switch (sim_below(sim, 6)) {
    case 0:
        sim_cover(sim, SIM_COVER_client_died);
        sim_client_detach(sim, client);
        break;
    case 1:
        sim_cover(sim, SIM_COVER_client_stalled);
        client->stalled_until_ns =
            sim->now_ns + (sim_one_in(sim, 3)
                               ? (sim->config.lease_max_age + sim_below(sim, 3)) * KVF_NS_PER_S
                               : sim_below(sim, 400 * sim->shape.tick_ns));
        break;
    case 2:
        burst(sim, client);
        break;
    default:
        sim_client_sleep(sim, client);
        break;
    }
}

static void scheduler_act(struct sim *sim, struct sim_client *client)
{
    uint64_t choice = sim_below(sim, 100);

    if (choice < 60) {
        sim_request_read(sim, client, KVF_OP_LOOKUP);
    } else if (choice < 80) {
        sim_request_read(sim, client, KVF_OP_PREFETCH);
    } else if (choice < 84) {
        sim_request_read(sim, client, KVF_OP_EVICT);
    } else if (choice < 90) {
        sim_request_cancel(sim, client);
    } else {
        sim_request_plain(sim, client, KVF_OP_NOP);
    }
}

static void rank_act(struct sim *sim, struct sim_client *client)
{
    uint64_t choice = sim_below(sim, 100);

    if (choice < 36) {
        sim_request_put(sim, client);
    } else if (choice < 70) {
        sim_request_read(sim, client, KVF_OP_GET);
    } else if (choice < 82) {
        sim_request_read(sim, client, KVF_OP_LOOKUP);
    } else if (choice < 87) {
        sim_request_read(sim, client, KVF_OP_PREFETCH);
    } else if (choice < 89) {
        sim_request_read(sim, client, KVF_OP_EVICT);
    } else if (choice < 92) {
        sim_request_cancel(sim, client);
    } else if (choice < 95) {
        sim_request_scribble(sim, client);
    } else if (choice < 97) {
        sim_request_plain(sim, client, KVF_OP_STAT);
    } else {
        sim_request_plain(sim, client, KVF_OP_NOP);
    }
}

static void client_act(struct sim *sim, struct sim_client *client)
{
    if (client->state == SIM_DETACHED && sim->now_ns >= client->respawn_ns) {
        sim_client_spawn(sim, client);
    } else if (client->state == SIM_READY && client->is_hostile) {
        sim_hostile_act(sim, client);
    } else if (client->state == SIM_READY && !sim_client_is_stalled(sim, client)) {
        if (sim_one_in(sim, 300)) {
            rare(sim, client);
        } else if (client->is_scheduler) {
            scheduler_act(sim, client);
        } else {
            rank_act(sim, client);
        }
    }
}

void sim_step(struct sim *sim)
{
    sim->step++;
    client_act(sim, &sim->clients[sim_below(sim, sim->shape.n_clients)]);
    sim_world_act(sim);
}

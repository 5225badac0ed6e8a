/* SPDX-License-Identifier: Apache-2.0
 *
 * sim_world.c: time, drives that fail, and what an operator does. The daemon's life is in
 * sim_daemon.c.
 */
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

#include "agent/peers.h"

#define SLEEP_NS_MAX (100 * KVF_NS_PER_MS) /* of the reactor */
#define SPIN_TURNS   5000                  /* without progress of time: it would burn a core */

/* ---- time ------------------------------------------------------------------------------------ */

void sim_time_set(struct sim *sim, uint64_t now_ns)
{
    assert(now_ns >= sim->now_ns);
    sim->now_ns = now_ns;
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        struct sim_drive *drive = &sim->drives[i];

        if (drive->disk == NULL) {
            continue; /* not made yet */
        }
        if (drive->is_stopped && now_ns >= drive->resume_ns) {
            drive->is_stopped = false;
            drive->lag_ns = now_ns - kvf_io_sim_now_ns(drive->disk);
        }
        if (!drive->is_stopped) {
            kvf_io_sim_advance(drive->disk, now_ns - drive->lag_ns);
        }
    }
}

static uint64_t drives_next_ns(const struct sim *sim)
{
    uint64_t next_ns = UINT64_MAX;

    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        const struct sim_drive *drive = &sim->drives[i];
        uint64_t due_ns = drive->disk == NULL ? UINT64_MAX : kvf_io_sim_next_ns(drive->disk);

        if (drive->is_stopped) {
            due_ns = drive->resume_ns;
        } else if (due_ns != UINT64_MAX) {
            due_ns += drive->lag_ns;
        }
        next_ns = due_ns < next_ns ? due_ns : next_ns;
    }
    return next_ns;
}

void sim_wait(struct sim *sim)
{
    uint64_t next_ns = drives_next_ns(sim);

    /* what is due on other drives stays due: only one of them is waited for */
    sim_time_set(sim, next_ns > sim->now_ns && next_ns != UINT64_MAX ? next_ns
                                                                     : sim->now_ns + KVF_NS_PER_US);
}

/* When the reactor would wake up by itself. */
static uint64_t agent_next_ns(const struct sim *sim)
{
    const struct kvf_agent *agent = sim->agent;
    uint64_t next_ns = agent->now_ns + SLEEP_NS_MAX;
    uint64_t place_ns = kvf_place_deadline_ns(agent);

    next_ns = place_ns < next_ns ? place_ns : next_ns;
    place_ns = kvf_peers_deadline_ns(agent);
    next_ns = place_ns < next_ns ? place_ns : next_ns;
    for (uint32_t i = 0; i < agent->sessions_capacity; i++) {
        const struct kvf_session *session = &agent->sessions[i];

        if (session->state == KVF_SESSION_READY) {
            uint64_t request_ns = kvf_request_deadline_ns(session);

            if (session->active != NULL ||
                session->ring.indices->sq_tail.value != session->ring.sq_head) {
                request_ns = sim->now_ns; /* it does not sleep beside submissions */
            }
            next_ns = request_ns < next_ns ? request_ns : next_ns;
        }
    }
    return next_ns;
}

uint64_t sim_next_event_ns(const struct sim *sim)
{
    uint64_t next_ns = agent_next_ns(sim);
    uint64_t other_ns = drives_next_ns(sim);

    next_ns = other_ns < next_ns ? other_ns : next_ns;
    other_ns = sim_work_next_ns(sim->work);
    return other_ns < next_ns ? other_ns : next_ns;
}

/* Clients that behave take what has come and give back what they have held. */
void sim_keep_house(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_clients; i++) {
        struct sim_client *client = &sim->clients[i];

        if (client->state == SIM_READY && !client->is_hostile &&
            !sim_client_is_stalled(sim, client)) {
            sim_client_take(sim, client, client->has_bye ? UINT32_MAX : 16);
            sim_lease_release_due(sim, client, client->has_bye);
            if (client->has_bye && sim_one_in(sim, 20)) {
                sim_client_detach(sim, client);
            }
        }
    }
}

bool sim_advance(struct sim *sim, uint64_t ns)
{
    uint64_t target_ns = sim->now_ns + ns;
    uint32_t turns = 0;

    if (sim->world != NULL) {
        return sim_nodes_advance(sim, ns);
    }
    while (sim->now_ns < target_ns) {
        uint64_t next_ns = sim_next_event_ns(sim);

        next_ns = next_ns < sim->now_ns ? sim->now_ns : next_ns;
        turns = next_ns == sim->now_ns ? turns + 1 : 0;
        if (turns > SPIN_TURNS) {
            sim_fail(sim, "the reactor spins: nothing happens, and it does not sleep");
        }
        sim_time_set(sim, next_ns < target_ns ? next_ns : target_ns);
        if (!sim_turn(sim)) {
            return false;
        }
        sim_keep_house(sim);
    }
    return true;
}

/* ---- a turn ---------------------------------------------------------------------------------- */

static void purge_settle(struct sim *sim)
{
    if (sim->purge_running && !sim->purge_seen) {
        sim_model_purge(sim, sim->purge_ns);
        sim->purge_seen = true;
    }
    if (sim->purge_running && sim->purge_done) {
        sim_trace(sim, "purge of namespace %u: %d", sim->purge_ns, sim->purge.status);
        sim->cover[SIM_COVER_purged] += sim->purge.status == KVF_OK;
        /* a drive that loses writes has confirmed what it does not have */
        sim_model_purged(sim, sim->purge_ns,
                         sim->purge.status == KVF_OK && !sim_drives_may_lie(sim));
        sim->purge_running = false;
    }
}

static void visit_clients(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_clients; i++) {
        struct sim_client *client = &sim->clients[i];
        bool is_stalled = sim_client_is_stalled(sim, client);

        if (client->state == SIM_READY && !client->is_hostile) {
            sim_judge(sim, client);
        }
        if (client->state != SIM_DETACHED && !is_stalled &&
            (client->state != SIM_READY || client->is_sleeping || sim->turn % 8 == i % 8)) {
            sim_client_poll(sim, client);
        }
        /* once it knows whether it is connected still */
        if (client->state == SIM_READY && !client->is_hostile && !is_stalled &&
            sim->turn % 8 == i % 8) {
            sim_judge_deadlines(sim, client);
        }
    }
}

bool sim_turn(struct sim *sim)
{
    int status = KVF_OK;
    bool goes_on;

    sim->turn++;
    goes_on = kvf_agent_turn(sim->agent, &status);
    visit_clients(sim);
    purge_settle(sim);
    sim_judge_suspect(sim);
    if (!goes_on && (!sim->is_draining || (status != KVF_OK && status != KVF_ERR_TIMEOUT))) {
        sim_fail(sim, "the reactor ended by itself: %d", status);
    }
    sim->end_status = status;
    sim_audit_turn(sim);
    if (sim->turn % 256 == 0) {
        sim_audit(sim);
        sim_nodes_audit(sim);
        sim_daemon_count(sim);
    }
    return goes_on;
}

/* ---- faults ---------------------------------------------------------------------------------- */

enum fault_kind {
    FAULT_NONE = 0,
    FAULT_READ_ERROR,
    FAULT_WRITE_ERROR,
    FAULT_NO_SPACE,
    FAULT_SYNC_ERROR,
    FAULT_READ_FLIP,
    FAULT_WRITE_FLIP, /* from here on silent ones */
    FAULT_WRITE_LOST,
    FAULT_WRITE_MISDIRECTED,
    FAULT_WRITE_TORN,
    FAULT_KINDS,
};

static void window_close(struct sim *sim, struct sim_drive *drive)
{
    const struct kvf_io_sim_faults none = {0};

    if (drive->window != FAULT_NONE) {
        kvf_io_sim_set_faults(drive->disk, &none);
        drive->window = FAULT_NONE;
        sim_trace(sim, "drive %u works again", (uint32_t)(drive - sim->drives));
    }
}

static void window_count(struct sim *sim, struct sim_drive *drive)
{
    uint64_t faults = kvf_io_sim_fault_count(drive->disk);

    if (drive->window != FAULT_NONE && faults > drive->faults_seen) {
        sim->cover[SIM_COVER_fault_read_error + drive->window - 1] += faults - drive->faults_seen;
    }
    drive->faults_seen = faults;
}

static void window_open(struct sim *sim, struct sim_drive *drive)
{
    uint32_t kinds = sim->shape.has_silent_faults ? FAULT_KINDS : FAULT_WRITE_FLIP;
    uint32_t one_in = (uint32_t)sim_between(sim, 2, 12);
    struct kvf_io_sim_faults faults = {0};

    drive->window = (uint8_t)sim_between(sim, 1, kinds - 1);
    drive->window_end_step = sim->step + sim_between(sim, 20, 400);
    if (sim_one_in(sim, 8)) { /* until the tier gives up */
        drive->window = FAULT_READ_ERROR;
        one_in = 1;
        drive->window_end_step += 4000;
    }
    faults.read_error = drive->window == FAULT_READ_ERROR ? one_in : 0;
    faults.write_error = drive->window == FAULT_WRITE_ERROR ? one_in : 0;
    faults.write_no_space = drive->window == FAULT_NO_SPACE ? one_in : 0;
    faults.sync_error = drive->window == FAULT_SYNC_ERROR ? one_in : 0;
    faults.read_flip = drive->window == FAULT_READ_FLIP ? one_in : 0;
    faults.write_flip = drive->window == FAULT_WRITE_FLIP ? one_in : 0;
    faults.write_lost = drive->window == FAULT_WRITE_LOST ? one_in : 0;
    faults.write_misdirected = drive->window == FAULT_WRITE_MISDIRECTED ? one_in : 0;
    faults.write_torn = drive->window == FAULT_WRITE_TORN ? one_in : 0;
    kvf_io_sim_set_faults(drive->disk, &faults);
    sim->is_life_damaged = true;
    drive->has_silent_faults |= drive->window >= FAULT_WRITE_FLIP;
    sim_trace(sim, "drive %u: fault %u, one in %u", (uint32_t)(drive - sim->drives), drive->window,
              one_in);
}

void sim_faults_end(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        window_count(sim, &sim->drives[i]);
        window_close(sim, &sim->drives[i]);
        sim->drives[i].is_stopped = false;
        sim->drives[i].lag_ns = sim->now_ns - kvf_io_sim_now_ns(sim->drives[i].disk);
    }
    sim->memory_denied = false;
}

static void faults_act(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->shape.n_drives; i++) {
        struct sim_drive *drive = &sim->drives[i];

        window_count(sim, drive);
        if (drive->window != FAULT_NONE) {
            if (sim->step >= drive->window_end_step) {
                window_close(sim, drive);
            }
        } else if (sim_one_in(sim, sim->shape.fault_in)) {
            window_open(sim, drive);
        } else if (!drive->is_stopped && sim_one_in(sim, 3000)) {
            drive->is_stopped = true;
            drive->resume_ns = sim->now_ns + sim_below(sim, 2000 * sim->shape.tick_ns);
            sim_cover(sim, SIM_COVER_fault_slow);
        }
    }
    if (sim_one_in(sim, 4000)) {
        sim->memory_denied = !sim->memory_denied;
    }
}

/* ---- the operator ---------------------------------------------------------------------------- */

static void purge_answered(struct kvf_control *control)
{
    struct sim *sim = control->owner;

    sim->purge_done = true;
}

static void purge(struct sim *sim)
{
    uint32_t ns = (uint32_t)sim_below(sim, SIM_NAMESPACES);

    if (sim->purge_running || sim->namespaces[ns].id == 0) {
        return;
    }
    sim->purge = (struct kvf_control){.op = KVF_CONTROL_PURGE,
                                      .namespace_id = sim->namespaces[ns].id,
                                      .done = purge_answered,
                                      .owner = sim};
    sim->purge_ns = (uint16_t)ns;
    sim->purge_running = true;
    sim->purge_seen = false;
    sim->purge_done = false;
    sim_trace(sim, "purge of namespace %u", ns);
    if (kvf_agent_post(sim->agent, &sim->purge) != KVF_OK) {
        sim_fail(sim, "no room for one question");
    }
}

static void question_answered(struct kvf_control *control)
{
    struct sim *sim = control->owner;

    sim_hash(sim, control->n_rows ^ control->verified << 20 ^ control->bad << 40);
    if (control->op == KVF_CONTROL_VERIFY) {
        sim->cover[SIM_COVER_verified] += control->verified > 0;
        if (control->bad != 0 && !sim->is_life_damaged && !sim_drives_may_lie(sim)) {
            sim_fail(sim, "verify finds %llu bad blocks on drives that never failed",
                     (unsigned long long)control->bad);
        }
    }
    sim->question_running = false;
}

static void ask(struct sim *sim)
{
    static const uint8_t ops[] = {KVF_CONTROL_STAT,       KVF_CONTROL_CLIENTS, KVF_CONTROL_BLOCKS,
                                  KVF_CONTROL_NAMESPACES, KVF_CONTROL_VERIFY,  KVF_CONTROL_VERIFY,
                                  KVF_CONTROL_EVICT};

    if (sim->question_running) {
        return;
    }
    sim->question = (struct kvf_control){.op = ops[sim_below(sim, sizeof(ops))],
                                         .max_rows = SIM_ROWS,
                                         .rows = sim->rows,
                                         .stat = sim->stat,
                                         .done = question_answered,
                                         .owner = sim};
    if (sim->question.op == KVF_CONTROL_EVICT) {
        sim->question.namespace_id = sim->namespaces[SIM_NAMESPACES - 1].id;
    }
    if (sim->question.op == KVF_CONTROL_EVICT && sim->question.namespace_id == 0) {
        return;
    }
    sim->question_running = true;
    if (kvf_agent_post(sim->agent, &sim->question) != KVF_OK) {
        sim_fail(sim, "no room for one question");
    }
}

/* The power goes at one of the next I/Os; the daemon goes on for a moment, its drives fail. */
static void power_loss_in_io(struct sim *sim)
{
    struct sim_drive *drive = &sim->drives[sim_below(sim, sim->shape.n_drives)];

    sim_trace(sim, "power loss ahead");
    kvf_io_sim_crash_at(drive->disk, 1 + sim_below(sim, 20));
    sim->is_life_damaged = true;
    for (int i = 0; i < 400 && !kvf_io_sim_is_crashed(drive->disk); i++) {
        (void)sim_advance(sim, sim->shape.tick_ns);
    }
    sim->cover[SIM_COVER_power_loss_in_io] += kvf_io_sim_is_crashed(drive->disk);
    (void)sim_advance(sim, sim_below(sim, 20 * sim->shape.tick_ns));
    sim_daemon_restart(sim, SIM_END_POWER);
}

static void end_daemon(struct sim *sim)
{
    if (sim_one_in(sim, 5)) { /* amid a purge that the drives do not know of yet */
        purge(sim);
        (void)sim_advance(sim, 2 * sim->shape.tick_ns);
    }
    switch (sim_below(sim, sim->shape.n_drives > 0 ? 4 : 2)) {
    case 0:
        sim_daemon_restart(sim, SIM_END_DRAIN);
        break;
    case 1:
        sim_daemon_restart(sim, SIM_END_KILL);
        break;
    case 2:
        sim_daemon_restart(sim, SIM_END_POWER);
        break;
    default:
        power_loss_in_io(sim);
        break;
    }
}

void sim_world_act(struct sim *sim)
{
    faults_act(sim);
    if (sim_one_in(sim, sim->shape.crash_in)) {
        end_daemon(sim);
        return;
    }
    sim->hbm_dies |= sim->shape.n_hbm != 0 && sim_one_in(sim, 3000);
    if (sim_one_in(sim, 4000)) {
        purge(sim);
    } else if (sim_one_in(sim, 1000)) {
        ask(sim);
    }
    if (sim_one_in(sim, 3)) {
        return; /* more acts before the next turn */
    }
    if (sim_one_in(sim, 600)) {
        (void)sim_advance(sim, sim_between(sim, 1, 3) * KVF_NS_PER_S);
    } else if (sim_one_in(sim, 50)) {
        (void)sim_advance(sim, sim_below(sim, 100 * sim->shape.tick_ns));
    } else {
        uint64_t ns = sim_below(sim, 2 * sim->shape.tick_ns);

        if (sim->world != NULL) {
            (void)sim_nodes_advance(sim, ns + 1);
            return;
        }
        sim_time_set(sim, sim->now_ns + ns);
        if (!sim_turn(sim)) {
            sim_fail(sim, "the reactor ended by itself");
        }
        sim_keep_house(sim);
    }
}

/* ---- the end --------------------------------------------------------------------------------- */

void sim_settle(struct sim *sim)
{
    sim_faults_end(sim);
    sim_leave(sim);
}

void sim_leave(struct sim *sim)
{
    (void)sim_advance(sim, KVF_NS_PER_S);
    for (uint32_t i = 0; i < sim->shape.n_clients; i++) {
        sim_client_detach(sim, &sim->clients[i]);
    }
    for (int i = 0; i < 100 && (sim->purge_running || sim->question_running ||
                                kvf_pool_taken_count(&sim->agent->flights) > 0 ||
                                sim->agent->sessions_count > 0);
         i++) {
        (void)sim_advance(sim, KVF_NS_PER_S / 4);
    }
    (void)sim_advance(sim, KVF_NS_PER_S);
    sim_audit_empty(sim);
}

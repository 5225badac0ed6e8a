/* SPDX-License-Identifier: Apache-2.0
 *
 * offence.c: delays of offenders, doubled and halved.
 */
#include "agent/offence.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/clock.h"
#include "base/mutant.h"

#define DELAY_NS  (KVF_OFFENCE_DELAY_MS * KVF_NS_PER_MS)
#define HALVES_NS KVF_NS_PER_S

/* What is left of its delay. Below the first delay nothing is. */
static uint64_t delay_ns(const struct kvf_offender *offender, uint64_t now_ns)
{
    uint64_t clean_ns = now_ns > offender->until_ns ? now_ns - offender->until_ns : 0;
    uint64_t halves = clean_ns / HALVES_NS;
    uint64_t left_ns = halves < 64 ? offender->delay_ns >> halves : 0;

    return left_ns < DELAY_NS ? 0 : left_ns;
}

static struct kvf_offender *find(const struct kvf_offenders *offenders, uint64_t peer)
{
    for (uint32_t i = 0; i < KVF_OFFENDERS_MAX; i++) {
        const struct kvf_offender *offender = &offenders->offenders[i];

        if (offender->peer != 0 && (offender->peer == peer || KVF_MUTANT(offenders_mixed))) {
            return (struct kvf_offender *)offender;
        }
    }
    return NULL;
}

static bool is_remote(uint64_t peer)
{
    return (peer & KVF_OFFENCE_REMOTE) != 0;
}

/* All remote clients of its tenant. */
static uint64_t whole_of(uint64_t peer)
{
    return peer & (KVF_OFFENCE_REMOTE | ((UINT64_C(1) << KVF_OFFENCE_FROM_SHIFT) - 1));
}

uint64_t kvf_offence_remote(uint32_t tenant, uint64_t address)
{
    assert(tenant < KVF_OFFENDERS_TENANTS_MAX);
    return KVF_OFFENCE_REMOTE | tenant | (address << KVF_OFFENCE_FROM_SHIFT & ~KVF_OFFENCE_REMOTE);
}

const char *kvf_offence_text(uint64_t peer)
{
    return is_remote(peer) ? "a client of this tenant and address broke the protocol, and others "
                             "of it wait to attach; retry in a second"
                           : "a client of this process broke the protocol, and others of it wait "
                             "to attach; retry in a second";
}

/* Whoever has ended first of these; unused ones have ended at 0. */
static struct kvf_offender *oldest(struct kvf_offenders *offenders, uint32_t first, uint32_t n)
{
    struct kvf_offender *place = &offenders->offenders[first];

    for (uint32_t i = first + 1; i < first + n; i++) {
        if (offenders->offenders[i].until_ns < place->until_ns) {
            place = &offenders->offenders[i];
        }
    }
    return place;
}

/* A place for one that has none; of a tenant's remote ones perhaps that of all of them. */
static struct kvf_offender *place_for(struct kvf_offenders *offenders, uint64_t peer,
                                      uint64_t now_ns)
{
    uint32_t first = KVF_OFFENDERS_LOCAL_MAX;
    struct kvf_offender *place;

    if (!is_remote(peer)) {
        place = oldest(offenders, 0, KVF_OFFENDERS_LOCAL_MAX);
    } else {
        /* the first is that of all */
        first += (uint32_t)(whole_of(peer) & ~KVF_OFFENCE_REMOTE) *
                 (1 + KVF_OFFENDERS_ADDRESSES_MAX);
        place = oldest(offenders, first + 1, KVF_OFFENDERS_ADDRESSES_MAX);
        if (peer == whole_of(peer) || place->until_ns > now_ns) {
            place = &offenders->offenders[first];
            peer = whole_of(peer);
        }
    }
    if (place->peer != peer) {
        *place = (struct kvf_offender){.peer = peer};
    }
    return place;
}

void kvf_offence_note(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    struct kvf_offender *offender;
    uint64_t next_ns;

    if (peer == 0 || offenders->delay_max_ns == 0) {
        return;
    }
    offender = find(offenders, peer);
    if (offender == NULL) {
        offender = place_for(offenders, peer, now_ns);
    }
    next_ns = 2 * delay_ns(offender, now_ns);
    next_ns = next_ns < DELAY_NS ? DELAY_NS : next_ns;
    offender->delay_ns = next_ns < offenders->delay_max_ns ? next_ns : offenders->delay_max_ns;
    offender->until_ns = now_ns + offender->delay_ns;
}

static uint64_t until_ns(const struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    const struct kvf_offender *offender = peer == 0 ? NULL : find(offenders, peer);

    return offender != NULL && offender->until_ns > now_ns ? offender->until_ns : 0;
}

uint64_t kvf_offence_until_ns(const struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    uint64_t own_ns = until_ns(offenders, peer, now_ns);
    uint64_t all_ns = is_remote(peer) ? until_ns(offenders, whole_of(peer), now_ns) : 0;

    return own_ns > all_ns ? own_ns : all_ns;
}

static void attach(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    struct kvf_offender *offender = peer == 0 ? NULL : find(offenders, peer);

    if (offender == NULL) {
        return;
    }
    offender->delay_ns = delay_ns(offender, now_ns);
    if (offender->delay_ns == 0) {
        *offender = (struct kvf_offender){0};
    } else if (offender->until_ns < now_ns + offender->delay_ns) {
        offender->until_ns = now_ns + offender->delay_ns;
    }
}

void kvf_offence_attach(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    attach(offenders, peer, now_ns);
    if (is_remote(peer) && whole_of(peer) != peer) {
        attach(offenders, whole_of(peer), now_ns);
    }
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * offence.c: delays of offenders, doubled and halved.
 */
#include "agent/offence.h"

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

static struct kvf_offender *place_for(struct kvf_offenders *offenders, uint64_t peer)
{
    bool is_remote = (peer & KVF_OFFENCE_REMOTE) != 0;
    uint32_t first = is_remote ? KVF_OFFENDERS_LOCAL_MAX : 0;
    uint32_t end = is_remote ? KVF_OFFENDERS_MAX : KVF_OFFENDERS_LOCAL_MAX;
    struct kvf_offender *place = &offenders->offenders[first];

    for (uint32_t i = first + 1; i < end; i++) {
        /* unused ones have ended at 0 */
        if (offenders->offenders[i].until_ns < place->until_ns) {
            place = &offenders->offenders[i];
        }
    }
    *place = (struct kvf_offender){.peer = peer};
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
        offender = place_for(offenders, peer);
    }
    next_ns = 2 * delay_ns(offender, now_ns);
    next_ns = next_ns < DELAY_NS ? DELAY_NS : next_ns;
    offender->delay_ns = next_ns < offenders->delay_max_ns ? next_ns : offenders->delay_max_ns;
    offender->until_ns = now_ns + offender->delay_ns;
}

uint64_t kvf_offence_until_ns(const struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
{
    const struct kvf_offender *offender = peer == 0 ? NULL : find(offenders, peer);

    return offender != NULL && offender->until_ns > now_ns ? offender->until_ns : 0;
}

void kvf_offence_attach(struct kvf_offenders *offenders, uint64_t peer, uint64_t now_ns)
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

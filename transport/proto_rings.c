/* SPDX-License-Identifier: Apache-2.0
 *
 * proto_rings.c: checks of what stands in shared memory (declared in proto.h).
 */
#include <string.h>

#include "transport/proto.h"
#include "transport/proto_check.h"
#include "transport/shm_lease.h"

uint32_t kvf_shm_sqe_blocks(const struct kvf_shm_sqe *sqe)
{
    switch (sqe->opcode) {
    case KVF_OP_GET:
    case KVF_OP_PUT:
    case KVF_OP_PREFETCH:
    case KVF_OP_EVICT:
        return sqe->n_keys;
    case KVF_OP_STAT:
        return KVF_STAT_COUNT;
    default:
        return 0;
    }
}

uint32_t kvf_shm_sqe_credits(const struct kvf_shm_sqe *sqe)
{
    if (sqe->opcode == KVF_OP_CANCEL || sqe->opcode == KVF_OP_RELEASE ||
        sqe->opcode == KVF_OP_REPORT) {
        return 0;
    }
    return kvf_shm_sqe_blocks(sqe) + 1;
}

/* What a submission of each opcode may carry; everything else must be 0. */
struct op_rule {
    uint8_t flags;
    bool known;
    bool keys;
    bool tails;
    bool budget;
    bool put; /* depth, ttl, priority, entries beyond the keys */
    bool arg; /* instead of a request number */
    bool ranks_only;
};

static const struct op_rule op_rules[] = {
    [KVF_OP_NOP] = {.known = true},
    [KVF_OP_LOOKUP] = {.known = true,
                       .flags = KVF_SQE_LEASE | KVF_SQE_PREFETCH,
                       .keys = true,
                       .tails = true,
                       .budget = true},
    [KVF_OP_GET] =
        {.known = true, .flags = KVF_SQE_DEVICE, .keys = true, .budget = true, .ranks_only = true},
    [KVF_OP_PUT] = {.known = true,
                    .flags = KVF_SQE_DURABLE | KVF_SQE_NO_WRITE | KVF_SQE_HAS_PARENT |
                             KVF_SQE_UNSUMMED,
                    .keys = true,
                    .budget = true,
                    .put = true,
                    .ranks_only = true},
    [KVF_OP_PREFETCH] = {.known = true, .keys = true, .budget = true},
    [KVF_OP_EVICT] = {.known = true, .keys = true},
    [KVF_OP_STAT] = {.known = true},
    [KVF_OP_CANCEL] = {.known = true, .arg = true},
    [KVF_OP_RELEASE] = {.known = true, .arg = true},
    [KVF_OP_REPORT] = {.known = true, .arg = true},
};

uint64_t kvf_shm_report_kind_max(uint16_t version)
{
    if (version < KVF_WIRE_VERSION_REPORT) {
        return 0;
    }
    return version < KVF_WIRE_VERSION_DECODE ? 11 : KVF_REPORT_KIND_MAX;
}

static bool is_report(uint64_t arg, uint16_t version)
{
    uint64_t kind = arg & ((1u << KVF_REPORT_KIND_BITS) - 1);

    return kind >= 1 && kind <= kvf_shm_report_kind_max(version) &&
           arg >> KVF_REPORT_KIND_BITS >= 1 && arg >> KVF_REPORT_KIND_BITS <= KVF_REPORT_MAX;
}

static int sqe_keys_check(const struct kvf_shm_sqe *sqe, const struct op_rule *rule,
                          const struct kvf_shm_limits *limits, const char **why_out)
{
    uint32_t parent = (sqe->flags & KVF_SQE_HAS_PARENT) != 0;

    if (!rule->keys) {
        if (sqe->n_keys != 0 || sqe->n_entries != 0 || sqe->n_tails != 0 || sqe->key_first != 0) {
            return kvf_proto_bad(why_out, "submission: keys on an operation without keys");
        }
        return KVF_OK;
    }
    if (sqe->n_keys == 0 || sqe->n_keys > KVF_REQUEST_KEYS_MAX) {
        return kvf_proto_bad(why_out, "submission: n_keys is out of range");
    }
    if (sqe->n_tails > (rule->tails ? KVF_TAIL_KEYS_MAX : 0) || sqe->n_tails > sqe->n_keys) {
        return kvf_proto_bad(why_out, "submission: n_tails is out of range");
    }
    if (rule->put
            ? sqe->n_entries < sqe->n_keys + parent || sqe->n_entries > 2u * sqe->n_keys + parent
            : sqe->n_entries != sqe->n_keys) {
        return kvf_proto_bad(why_out, "submission: n_entries does not fit n_keys");
    }
    if (sqe->n_entries > limits->key_entries) {
        return kvf_proto_bad(why_out, "submission: more key entries than the key area has");
    }
    if (sqe->key_first != limits->key_head) {
        return kvf_proto_bad(why_out, "submission: key_first is not behind the keys before");
    }
    return KVF_OK;
}

int kvf_shm_sqe_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_limits *limits,
                      const char **why_out)
{
    const uint8_t either = KVF_SQE_DURABLE | KVF_SQE_NO_WRITE;
    const struct op_rule *rule;

    if (sqe->opcode >= sizeof(op_rules) / sizeof(op_rules[0]) || !op_rules[sqe->opcode].known) {
        return kvf_proto_bad(why_out, "submission: opcode is unknown");
    }
    rule = &op_rules[sqe->opcode];
    if ((sqe->flags & ~rule->flags) != 0 || (sqe->flags & either) == either) {
        return kvf_proto_bad(why_out, "submission: flags do not fit the opcode");
    }
    if (((sqe->flags & KVF_SQE_UNSUMMED) != 0 && limits->version < KVF_WIRE_VERSION_UNSUMMED) ||
        ((sqe->flags & KVF_SQE_DEVICE) != 0 && limits->version < KVF_WIRE_VERSION_GPU)) {
        return kvf_proto_bad(why_out, "submission: a flag of a later version than was agreed on");
    }
    if (sqe->opcode == KVF_OP_REPORT && !is_report(sqe->arg, limits->version)) {
        return kvf_proto_bad(why_out, "submission: a report of an unknown kind or amount");
    }
    if (rule->ranks_only && limits->scheduler) {
        return kvf_proto_bad(why_out, "submission: get or put on a scheduler's connection");
    }
    if (rule->arg ? sqe->request != 0 || sqe->arg == 0 : sqe->request == 0 || sqe->arg != 0) {
        return kvf_proto_bad(why_out, "submission: request and arg do not fit the opcode");
    }
    if (!rule->budget && sqe->budget_ms != 0) {
        return kvf_proto_bad(why_out, "submission: a budget on an operation without one");
    }
    if (rule->put ? sqe->priority > 2 : sqe->depth != 0 || sqe->ttl_s != 0 || sqe->priority != 0) {
        return kvf_proto_bad(why_out, "submission: depth, ttl_s or priority is out of range");
    }
    if (!kvf_proto_all_zero(sqe->reserved0, sizeof(sqe->reserved0)) ||
        !kvf_proto_all_zero(sqe->reserved1, sizeof(sqe->reserved1))) {
        return kvf_proto_bad(why_out, "submission: reserved is not 0");
    }
    return sqe_keys_check(sqe, rule, limits, why_out);
}

int kvf_shm_key_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_key *key,
                      bool with_record, const struct kvf_shm_limits *limits, const char **why_out)
{
    uint32_t named_first = sqe->n_keys + ((sqe->flags & KVF_SQE_HAS_PARENT) != 0);

    if (key->key_bytes < KVF_KEY_BYTES_MIN || key->key_bytes > KVF_KEY_BYTES_MAX) {
        return kvf_proto_bad(why_out, "key: key_bytes is out of range");
    }
    if (!kvf_proto_all_zero(key->key + key->key_bytes, sizeof(key->key) - key->key_bytes) ||
        !kvf_proto_all_zero(key->reserved, sizeof(key->reserved))) {
        return kvf_proto_bad(why_out, "key: bytes behind the key or reserved are not 0");
    }
    if (!with_record) {
        if (key->supersedes != 0 || key->token_start != 0 || key->stage_offset != 0 ||
            key->record_bytes != 0) {
            return kvf_proto_bad(why_out, "key: fields of a put are set");
        }
        return KVF_OK;
    }
    if (key->supersedes != 0 &&
        (key->supersedes <= named_first || key->supersedes > sqe->n_entries)) {
        return kvf_proto_bad(why_out, "key: supersedes names no entry of this request");
    }
    if (key->record_bytes <= KVF_RECORD_PAGE_BYTES || key->record_bytes > KVF_PROTO_RECORD_MAX) {
        return kvf_proto_bad(why_out, "key: record_bytes is out of range");
    }
    if (key->stage_offset % KVF_PROTO_PAGE_BYTES != 0 ||
        key->stage_offset >= limits->staging_bytes ||
        key->record_bytes > limits->staging_bytes - key->stage_offset) {
        return kvf_proto_bad(why_out, "key: the record does not lie inside staging");
    }
    return KVF_OK;
}

int kvf_shm_keys_check(const struct kvf_shm_sqe *sqe, const struct kvf_shm_key *keys,
                       const struct kvf_shm_limits *limits, const char **why_out)
{
    for (uint32_t i = 0; i < sqe->n_entries; i++) {
        bool with_record = sqe->opcode == KVF_OP_PUT && i < sqe->n_keys;

        if (kvf_shm_key_check(sqe, &keys[i], with_record, limits, why_out) != KVF_OK) {
            return KVF_ERR_PROTOCOL;
        }
    }
    return KVF_OK;
}

int kvf_shm_cqe_check(const struct kvf_shm_cqe *cqe, const char **why_out)
{
    if (cqe->request == 0) {
        return kvf_proto_bad(why_out, "completion: request is 0");
    }
    if (cqe->kind != KVF_CQE_BLOCK && cqe->kind != KVF_CQE_REQUEST) {
        return kvf_proto_bad(why_out, "completion: kind is unknown");
    }
    if (cqe->tier > KVF_TIER_REMOTE) {
        return kvf_proto_bad(why_out, "completion: tier is unknown");
    }
    if (!kvf_proto_status_known(cqe->status)) {
        return kvf_proto_bad(why_out, "completion: status is unknown");
    }
    if (cqe->reserved0 != 0) {
        return kvf_proto_bad(why_out, "completion: reserved is not 0");
    }
    if (cqe->lease != 0 && kvf_lease_id_generation(cqe->lease) == 0) {
        return kvf_proto_bad(why_out, "completion: lease has no generation");
    }
    return KVF_OK;
}

static bool counts_ok(uint32_t sq_entries, uint32_t cq_entries, uint32_t key_entries,
                      uint32_t lease_entries)
{
    return kvf_proto_power_of_two(sq_entries) && sq_entries <= KVF_SHM_RING_ENTRIES_MAX &&
           kvf_proto_power_of_two(cq_entries) && cq_entries <= 2 * KVF_SHM_RING_ENTRIES_MAX &&
           kvf_proto_power_of_two(key_entries) && key_entries >= KVF_SHM_KEY_ENTRIES_MIN &&
           key_entries <= KVF_SHM_KEY_ENTRIES_MAX && kvf_proto_power_of_two(lease_entries) &&
           lease_entries <= KVF_SHM_LEASE_ENTRIES_MAX;
}

/* Parts follow one another, each on a cache line of its own. The largest sum (counts_ok) is under
 * 2^28, so 32-bit offsets do not overflow. */
static uint32_t part_end(uint32_t offset, uint32_t entries, size_t entry_bytes)
{
    return (uint32_t)((offset + entries * entry_bytes + 63) & ~(size_t)63);
}

int kvf_shm_layout_init(struct kvf_shm_header *header, uint32_t sq_entries, uint32_t cq_entries,
                        uint32_t key_entries, uint32_t lease_entries)
{
    uint64_t end;

    if (!counts_ok(sq_entries, cq_entries, key_entries, lease_entries)) {
        return KVF_ERR_INVALID;
    }
    memset(header, 0, sizeof(*header));
    header->magic = KVF_SHM_MAGIC;
    header->version = KVF_SHM_VERSION;
    header->header_bytes = sizeof(*header);
    header->indices_offset = sizeof(*header);
    header->sq_offset = header->indices_offset + (uint32_t)sizeof(struct kvf_shm_indices);
    header->sq_entries = sq_entries;
    header->cq_offset = part_end(header->sq_offset, sq_entries, sizeof(struct kvf_shm_sqe));
    header->cq_entries = cq_entries;
    header->keys_offset = part_end(header->cq_offset, cq_entries, sizeof(struct kvf_shm_cqe));
    header->key_entries = key_entries;
    header->leases_offset = part_end(header->keys_offset, key_entries, sizeof(struct kvf_shm_key));
    header->lease_entries = lease_entries;
    end = part_end(header->leases_offset, lease_entries, sizeof(uint64_t));
    header->segment_bytes = (end + KVF_PROTO_PAGE_BYTES - 1) / KVF_PROTO_PAGE_BYTES *
                            KVF_PROTO_PAGE_BYTES;
    return KVF_OK;
}

/* Does a part of entries * entry_bytes start at or behind `from`, on a cache line, and end inside
 * the segment? *end_out: where it ends. */
static bool part_ok(uint64_t from, uint64_t offset, uint32_t entries, size_t entry_bytes,
                    uint64_t segment_bytes, uint64_t *end_out)
{
    *end_out = offset + (uint64_t)entries * entry_bytes;
    return offset >= from && offset % 64 == 0 && *end_out <= segment_bytes;
}

int kvf_shm_header_check(const struct kvf_shm_header *header, uint64_t segment_bytes,
                         const char **why_out)
{
    const struct kvf_shm_header *h = header;
    uint64_t end = sizeof(*h);

    if (h->magic != KVF_SHM_MAGIC) {
        return kvf_proto_bad(why_out, "ring segment: magic is wrong");
    }
    if (h->version != KVF_SHM_VERSION || h->header_bytes != sizeof(*h)) {
        return kvf_proto_bad(why_out, "ring segment: version or header_bytes is unknown");
    }
    if (h->reserved0 != 0 || h->reserved1 != 0 ||
        !kvf_proto_all_zero(h->reserved, sizeof(h->reserved))) {
        return kvf_proto_bad(why_out, "ring segment: reserved is not 0");
    }
    if (h->segment_bytes != segment_bytes) {
        return kvf_proto_bad(why_out, "ring segment: segment_bytes is not the announced size");
    }
    if (!counts_ok(h->sq_entries, h->cq_entries, h->key_entries, h->lease_entries)) {
        return kvf_proto_bad(why_out, "ring segment: an entry count is no power of two in range");
    }
    if (!part_ok(end, h->indices_offset, 1, sizeof(struct kvf_shm_indices), segment_bytes, &end) ||
        !part_ok(end, h->sq_offset, h->sq_entries, sizeof(struct kvf_shm_sqe), segment_bytes,
                 &end) ||
        !part_ok(end, h->cq_offset, h->cq_entries, sizeof(struct kvf_shm_cqe), segment_bytes,
                 &end) ||
        !part_ok(end, h->keys_offset, h->key_entries, sizeof(struct kvf_shm_key), segment_bytes,
                 &end) ||
        !part_ok(end, h->leases_offset, h->lease_entries, sizeof(uint64_t), segment_bytes, &end)) {
        return kvf_proto_bad(why_out,
                             "ring segment: a part overlaps another or leaves the segment");
    }
    return KVF_OK;
}

/* SPDX-License-Identifier: Apache-2.0
 *
 * stage_area.h: which 4 KiB pages of a connection's staging memory are taken, and by what.
 *
 *   [ slot A ][ free ][ slot B        ][ free            ]
 *    ^first               one entry a page; the first and the last entry of each extent say how
 *                         long it is, so neighbours are found in both directions
 *
 * The search goes on from where the last one ended and wraps: puts come and go in about the order
 * of their slots, so the first extent looked at nearly always fits. Freeing joins free neighbours
 * at once. All state is private memory; nothing here touches the staging memory itself.
 *
 * Owner: the thread that uses the client handle. Nothing blocks; only init allocates.
 */
#ifndef KVF_CLIENT_STAGE_AREA_H
#define KVF_CLIENT_STAGE_AREA_H

#include <stdbool.h>
#include <stdint.h>

#define KVF_STAGE_PAGE_BYTES 4096

/* Half of a slot's handle each: 24 bits, so 64 GiB of staging. */
#define KVF_STAGE_PAGES_MAX (1u << 24)

struct kvf_stage_entry {
    uint32_t pages;        /* first and last page of an extent: its length; inside: 0 */
    uint32_t generation;   /* first page of a slot: its use, 1..2^24-1; elsewhere 0 */
    uint32_t record_bytes; /* first page of a slot: what lies in it, 0: nothing described so far */
    bool is_taken;         /* first and last page of an extent: a slot, not free */
    bool is_in_flight;     /* first page of a slot: a put owns it, not the caller */
};

struct kvf_stage_area {
    struct kvf_stage_entry *entries; /* one a page */
    uint32_t n_pages;
    uint32_t free_pages;
    uint32_t rover; /* first page of the extent to look at next */
    uint32_t generation;
};

/* KVF_OK; KVF_ERR_INVALID: no pages or too many; KVF_ERR_NO_MEMORY. */
int kvf_stage_area_init(struct kvf_stage_area *area, uint64_t bytes);

/* Accepts a zeroed struct. */
void kvf_stage_area_fini(struct kvf_stage_area *area);

/* Take `pages` consecutive pages. KVF_OK; KVF_ERR_BUSY: not now; KVF_ERR_TOO_LARGE: never. */
int kvf_stage_area_take(struct kvf_stage_area *area, uint32_t pages, uint32_t *page_out);

/* Give back all of a slot behind its first `pages` pages (at least 1). */
void kvf_stage_area_shrink(struct kvf_stage_area *area, uint32_t page, uint32_t pages);

/* Give a slot back. */
void kvf_stage_area_give(struct kvf_stage_area *area, uint32_t page);

/* The slot that starts at this page in this generation, NULL if there is none. */
struct kvf_stage_entry *kvf_stage_area_find(const struct kvf_stage_area *area, uint32_t page,
                                            uint32_t generation);

#endif /* KVF_CLIENT_STAGE_AREA_H */

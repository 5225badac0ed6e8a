/* SPDX-License-Identifier: Apache-2.0
 *
 * calls.h: an engine in small for tests of kvf_gpu_*: a daemon, a client, pages in device memory,
 * and the C codecs as reference. Runs on a GPU and on the fake driver (tests/support/fake_cuda.h).
 */
#ifndef KVF_TESTS_GPU_CALLS_H
#define KVF_TESTS_GPU_CALLS_H

#include "client/client_internal.h"
#include "codec/codec.h"
#include "gpu/device.h"
#include "kvferry.h"
#include "tests/support/daemon.h"
#include "tests/support/fake_cuda.h"

enum {
    CALLS_PAGES = 96,
    CALLS_PAGE_TOKENS = 8,
    CALLS_CHUNK_TOKENS = 32,
    CALLS_CHUNK_PAGES = CALLS_CHUNK_TOKENS / CALLS_PAGE_TOKENS,
    CALLS_LAYERS = 3,
    CALLS_HEADS = 2,
    CALLS_DIM_K = 128,
    CALLS_DIM_V = 64,
};

/* The driver as the engine uses it. */
extern struct kvf_gpu_device *calls_device;
extern struct fake_cuda calls_fake; /* all NULL on a GPU */

/* Open the device and make its context current. False: there is none, and stdout says why. */
bool calls_device_open(void);
void calls_device_close(void);

/* The same, and a seed, which the fake driver takes as well. */
bool calls_begin(uint64_t *seed_out);

/* Ends the test if the driver refused. */
void calls_check(int result);

/* Is memory of calls_alloc made of mapped pieces (cuMemMap), begun in the middle of one? */
extern bool calls_maps;

uint64_t calls_alloc(size_t bytes);
void calls_free(uint64_t address);
void *calls_pinned(size_t bytes);
void calls_write(uint64_t to, const void *from, size_t bytes); /* and waits */
void calls_read(void *to, uint64_t from, size_t bytes);        /* and waits */
void *calls_stream(void);
void *calls_event(void);

/* Pages of all layers: (B, H, N, K and V), one layer behind the other. */
struct calls_pages {
    uint64_t address;
    uint8_t *host; /* the same, where the C codecs can read and write it */
    size_t bytes;
    size_t page_bytes;
    void *layers[2][CALLS_LAYERS];      /* device addresses */
    void *host_layers[2][CALLS_LAYERS]; /* the same in host */
    struct kvf_gpu_region *region;
};

/* An engine: fill sets and options before calls_start. */
struct calls {
    struct kvf_test_daemon daemon;
    struct kvf_client *client;
    struct kvf_gpu *gpu;
    struct kvf_gpu_options options;
    const char *profile;
    uint8_t model; /* all bytes of the client's weights_digest */
    uint64_t staging_bytes;
    struct calls_pages pages;
    struct kvf_random_seeded random;
    uint32_t n_log_errors;
    char log_text[512]; /* the last line of severity 0 or 1 */
    void *workspace;
    uint8_t *record; /* of the last calls_encode */
    size_t record_bytes;
};

/* A daemon. Kill and start it as the test likes. */
void calls_daemon_start(struct calls *calls, const char *const *sets);

/* The client alone, and options for kvf_gpu_open. */
void calls_client_open(struct calls *calls, const char *profile, uint64_t seed);

/* Client, GPU handle, pages with random content. */
void calls_open(struct calls *calls, const char *profile, uint64_t seed);
void calls_close(struct calls *calls);
void calls_daemon_stop(struct calls *calls);

/* The process of the daemon's worker, and (may be NULL) its state as in /proc. 0: there is none. */
pid_t calls_worker_pid(const struct calls *calls, char *state_out);

/* Send it SIGSTOP, and return when it stands still. */
pid_t calls_worker_stop(const struct calls *calls);

/* Run an array of tests beside a daemon that all of them use; what main returns. */
struct CMUnitTest;
int calls_run_tests(struct calls *calls, const struct CMUnitTest *tests, size_t n);
#define calls_run(calls, tests) calls_run_tests(calls, tests, sizeof(tests) / sizeof((tests)[0]))

/* A region over pages of a size of the caller's choice. */
void calls_pages_init(struct calls *calls, struct calls_pages *pages);
void calls_pages_fini(struct calls_pages *pages);

/* Put new memory, of calls_maps, in the place of the pages. */
void calls_pages_replace(struct calls *calls);

/* Other content in host and device. */
void calls_fill(struct calls *calls);

/* A view of host pages by ids. */
struct kvf_kv_view calls_view(struct calls_pages *pages, const uint32_t *ids);

/* The record that the C codec makes of host pages. */
void calls_encode(struct calls *calls, const uint32_t *ids, uint32_t token_start,
                  uint32_t n_tokens);

/* Does the daemon hold that record under this key? */
void calls_assert_stored(struct calls *calls, const struct kvf_key *key);

/* Decode a record into host pages, as a get with the same arguments should have done on the device.
 */
void calls_decode(struct calls *calls, const void *record, size_t record_bytes,
                  uint32_t token_first, uint32_t n_tokens, const uint32_t *ids);

/* Are pages on the device and host the same, all of them? */
void calls_assert_pages_equal(struct calls *calls);
bool calls_pages_are_equal(struct calls_pages *pages);

/* Keys by number. */
struct kvf_key calls_key(uint64_t number, char text[24]);

/* The number of the next chain's first key, where others use the same daemon. */
void calls_key_first(uint64_t number);

/* What became of a request: each event comes once. */
struct calls_outcome {
    bool pages_free;
    bool is_over;
    bool has_block[64];
    int32_t free_status;
    int32_t status;
    uint32_t n_good;
    int32_t blocks[64];
    uint8_t tiers[64];
};

/* Take what events there are, waiting up to timeout_ms for the first; events of other requests end
 * the test. Returns how many. */
uint32_t calls_take(struct calls *calls, const uint64_t *requests, struct calls_outcome *outcomes,
                    uint32_t n, uint32_t timeout_ms);

/* Poll until a request is over; events of others end the test. */
void calls_wait(struct calls *calls, uint64_t request, struct calls_outcome *outcome);

/* A chain of blocks in pages of the region, which a put and a get name. */
struct calls_chain {
    uint32_t n;
    char keys[16][24];
    uint32_t ids[16][CALLS_CHUNK_PAGES];
    struct kvf_gpu_put_item puts[16];
    struct kvf_gpu_get_item gets[16];
};

/* n blocks of new names in the first pages, the last with n_tail tokens (0: a full chunk). */
void calls_chain_init(struct calls_chain *chain, uint32_t n, uint32_t n_tail);

/* Pages of chunk i: its own, in no order. */
void calls_chain_ids(uint32_t i, uint32_t ids[CALLS_CHUNK_PAGES]);

/* Give block i a name that nothing has. */
void calls_chain_rename(struct calls_chain *chain, uint32_t i);

/* Put or get all of it, and wait. */
void calls_chain_put(struct calls *calls, const struct calls_chain *chain,
                     struct calls_outcome *outcome);
void calls_chain_get(struct calls *calls, const struct calls_chain *chain,
                     struct calls_outcome *outcome);

/* The same; the daemon must hold what the C codecs make of it. */
void calls_chain_put_and_check(struct calls *calls, const struct calls_chain *chain);

/* The same, into pages with other content: what was put is there afterwards, as the C codecs decode
 * it, and all other bytes are untouched. */
void calls_chain_get_and_check(struct calls *calls, const struct calls_chain *chain);

/* Run a test program again, beside the daemon that is there, with one wait left out. Arguments of
 * main: mutant, the daemon's socket, the first name of its blocks. Returns what waitpid says. */
int calls_run_alone(const struct calls *calls, const char *program, const char *mutant,
                    uint64_t first_key);

/* The path of this program. */
void calls_own_program(char program_out[KVF_TEST_PATH_BYTES]);

/* Say whether such a run has noticed, by exit code 1 or a signal; on the fake driver it has to. */
void calls_assert_caught(const char *mutant, int wait_status);

#endif /* KVF_TESTS_GPU_CALLS_H */

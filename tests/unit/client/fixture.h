/* SPDX-License-Identifier: Apache-2.0
 *
 * fixture.h: a directory, a fake daemon and a handle for each test of the library.
 */
#ifndef KVF_TESTS_CLIENT_FIXTURE_H
#define KVF_TESTS_CLIENT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvferry.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/support.h"

struct fixture {
    struct kvf_test_dir dir;
    char path[KVF_TEST_PATH_BYTES];
    struct kvf_fake_script script;
    struct kvf_fake_daemon *daemon;
    struct kvf_options options;
    struct kvf_client *client;
    char log[512]; /* the last line of the library */
    uint32_t n_logs;
};

static inline void fixture_log(void *arg, int severity, const char *text)
{
    struct fixture *f = arg;

    (void)severity;
    snprintf(f->log, sizeof(f->log), "%s", text);
    f->n_logs++;
}

static inline int fixture_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    if (f == NULL) {
        return -1;
    }
    kvf_test_dir_create(&f->dir);
    kvf_test_dir_path(&f->dir, "kvferryd.sock", f->path);
    f->script.socket_path = f->path;
    kvf_options_init(&f->options);
    f->options.socket_path = f->path;
    f->options.client_name = "test";
    f->options.log = fixture_log;
    f->options.log_arg = f;
    *state = f;
    return 0;
}

static inline int fixture_teardown(void **state)
{
    struct fixture *f = *state;

    f->client = kvf_close(f->client);
    kvf_fake_daemon_stop(f->daemon);
    kvf_test_dir_remove(&f->dir);
    free(f);
    return 0;
}

static inline void fixture_serve(struct fixture *f)
{
    f->daemon = kvf_fake_daemon_start(&f->script);
}

static inline void fixture_open(struct fixture *f)
{
    fixture_serve(f);
    assert_int_equal(kvf_open(&f->options, &f->client), KVF_OK);
}

/* Keys "key-<number>" of 16 bytes and more, in static storage of `texts`. */
#define KEY_BYTES 24

struct key_set {
    char texts[1100][KEY_BYTES];
    struct kvf_key keys[1100];
};

static inline void keys_fill(struct key_set *set, const char *prefix, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        memset(set->texts[i], 0, KEY_BYTES);
        snprintf(set->texts[i], KEY_BYTES, "%s-%05u", prefix, i);
        set->keys[i] = (struct kvf_key){.data = set->texts[i], .bytes = KEY_BYTES};
    }
}

static inline struct kvf_put_item item_of(const struct kvf_key *key, const void *data, size_t bytes)
{
    return (struct kvf_put_item){
        .struct_bytes = sizeof(struct kvf_put_item),
        .source = KVF_SOURCE_BYTES,
        .key = *key,
        .data = data,
        .data_bytes = bytes,
    };
}

static inline int put_bytes(struct fixture *f, const struct kvf_key *key, const void *data,
                            size_t bytes)
{
    struct kvf_put_item item = item_of(key, data, bytes);

    return kvf_put(f->client, &item, 1, NULL, NULL);
}

#define FIXTURE_TEST(function)                                                                     \
    cmocka_unit_test_setup_teardown(function, fixture_setup, fixture_teardown)

#endif /* KVF_TESTS_CLIENT_FIXTURE_H */

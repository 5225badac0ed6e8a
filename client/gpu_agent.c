/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_agent.c: path AGENT: a worker of the daemon encodes and decodes, over pages of this process
 * that it has opened.
 *
 *          ask daemon     channel       WELCOME        regions       hang-up
 *   DOWN ---------> ASKED ------> GREETING -----> SHARING -----> UP ---------> ENDING
 *    ^                | refused      |               |                            |
 *    +----------------+--------------+---------------+----------------------------+
 *       a pause                               GONE, or the worker's process has ended
 *
 * None of these steps waits: each takes the messages that are there. What waits for the worker, up
 * to CALL_NS, are the calls about regions and sleep, and close.
 *
 * Ordering. A request's flag value is written by a stream of ours, behind the events and streams
 * that the caller names; the worker begins when it sees it. No stream of this process ever waits
 * for the worker, so its death costs what it had in flight and nothing else. What it has done comes
 * by messages, which it sends when its device has ended it.
 *
 * After a hang-up requests stay in flight until nothing can write to pages any longer: a worker
 * says GONE when it has unmapped them; one that died is waited for by its pidfd, which becomes
 * readable when the kernel has taken its context down.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/fd.h"
#include "client/gpu_remote.h"
#include "transport/segment.h"
#include "transport/seqpacket.h"

#define GREET_NS     (20 * KVF_NS_PER_S) /* it attaches to the daemon meanwhile */
#define PAUSE_NS_MIN (100 * KVF_NS_PER_MS)
#define PAUSE_NS_MAX (10 * KVF_NS_PER_S)
#define LOOK_MS      1   /* while flags are to be written, or the link is being made */
#define SLEEP_MS     200 /* the daemon's socket wants a look, too */

/* ----------------------------------------------------------------------------------------------
 * The end of a link
 */
static void requests_fail(struct kvf_gpu *gpu, int32_t status)
{
    for (struct kvf_gpu_request *request = gpu->requests; request != NULL;
         request = request->next) {
        for (uint32_t i = 0; i < request->n; i++) {
            if (!request->items[i].is_done) {
                kvf_gpu_item_done(gpu, &request->items[i], status, KVF_TIER_NONE);
            }
        }
        if (request->n_encoding > 0) {
            request->free_status = status;
        }
        request->n_encoding = request->n_bursts = 0;
    }
    gpu->agent->n_requests = 0;
}

static void unsent_drop(struct kvf_gpu_remote *remote)
{
    while (remote->unsent != NULL) {
        struct unsent *unsent = remote->unsent;

        remote->unsent = unsent->next;
        free(unsent);
    }
    remote->unsent_tail = &remote->unsent;
}

/* Our streams may still write the flags. False: they do. */
static bool flags_drop(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    const struct kvf_gpu_driver *driver = &gpu->device->driver;

    if (remote->flags == NULL) {
        return true;
    }
    if (driver->cuStreamQuery(gpu->put_stream) == KVF_CUDA_ERROR_NOT_READY ||
        driver->cuStreamQuery(gpu->get_stream) == KVF_CUDA_ERROR_NOT_READY) {
        return false;
    }
    if (remote->are_flags_pinned) {
        kvf_gpu_unpin(gpu->device, remote->flags);
    }
    kvf_segment_unmap(remote->flags, KVF_GPUD_FLAG_BYTES);
    remote->flags = NULL;
    remote->are_flags_pinned = false;
    return true;
}

/* The link is over; requests end when the worker's last work has. */
static void link_lose(struct kvf_gpu *gpu, int32_t status, const char *why)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    if (remote->state == LINK_ENDING || remote->state == LINK_DOWN) {
        return;
    }
    if (remote->status != status || remote->state == LINK_UP) {
        kvf_client_log(gpu->client, 1, "agent path down (%s): %s", kvf_status_name(status), why);
    }
    remote->status = status;
    remote->state = LINK_ENDING;
    if (remote->fd >= 0) {
        /* a worker that is well sees a hang-up, and answers with GONE */
        (void)shutdown(remote->fd, SHUT_WR);
    }
    remote->n_awaited = 0;
    kvf_gpu_remote_share_stop(gpu);
    unsent_drop(remote);
    remote->n_memories = 0;
}

/* Is nothing of ours in the worker's hands any more? */
static bool worker_is_gone(const struct kvf_gpu_remote *remote)
{
    struct pollfd one = {.fd = remote->pid_fd, .events = POLLIN};

    return remote->pid_fd < 0 || remote->is_gone || remote->n_requests == 0 ||
           poll(&one, 1, 0) == 1;
}

static void link_end(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    if (!worker_is_gone(remote)) {
        return;
    }
    requests_fail(gpu, KVF_ERR_DISCONNECTED);
    if (!flags_drop(gpu)) {
        return;
    }
    kvf_fd_close(&remote->fd);
    kvf_fd_close(&remote->pid_fd);
    remote->is_gone = false;
    remote->pause_ns = remote->pause_ns == 0 ? PAUSE_NS_MIN : 2 * remote->pause_ns;
    remote->pause_ns = remote->pause_ns < PAUSE_NS_MAX ? remote->pause_ns : PAUSE_NS_MAX;
    remote->next_ns = kvf_now_ns() + remote->pause_ns;
    remote->state = LINK_DOWN;
}

/* ----------------------------------------------------------------------------------------------
 * Messages
 */
static void flush(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    while (remote->unsent != NULL) {
        struct unsent *unsent = remote->unsent;
        int status = kvf_seqpacket_send(remote->fd, unsent->data, unsent->bytes, NULL, 0);

        if (status != KVF_OK) {
            return; /* a hang-up is seen when messages are taken */
        }
        remote->unsent = unsent->next;
        if (remote->unsent == NULL) {
            remote->unsent_tail = &remote->unsent;
        }
        free(unsent);
    }
}

/* Send the message being built, now or later. KVF_OK; KVF_ERR_NO_MEMORY. */
static int send_later(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    size_t bytes = remote->message.head.bytes;
    struct unsent *unsent = malloc(sizeof(*unsent) + bytes);

    if (unsent == NULL) {
        link_lose(gpu, KVF_ERR_NO_MEMORY, "no memory for messages");
        return KVF_ERR_NO_MEMORY;
    }
    unsent->next = NULL;
    unsent->bytes = bytes;
    memcpy(unsent->data, remote->message.bytes, bytes);
    *remote->unsent_tail = unsent;
    remote->unsent_tail = &unsent->next;
    flush(gpu);
    return KVF_OK;
}

static struct kvf_gpu_request *request_find(struct kvf_gpu *gpu, uint64_t id)
{
    struct kvf_gpu_request *request = gpu->requests;

    while (request != NULL && request->id != id) {
        request = request->next;
    }
    return request;
}

/* False: an event that cannot be. */
static bool on_event(struct kvf_gpu *gpu, const struct kvf_gpud_event *event)
{
    struct kvf_gpu_request *request = request_find(gpu, event->request);

    if (request == NULL || request->n_bursts == 0) {
        return false;
    }
    switch ((enum kvf_gpu_event_kind)event->kind) {
    case KVF_GPU_EVENT_PAGES_FREE:
        if (request->n_encoding == 0) {
            return false;
        }
        request->n_encoding = 0;
        request->free_status = event->status;
        return true;
    case KVF_GPU_EVENT_BLOCK:
        if (event->index >= request->n || request->items[event->index].is_done) {
            return false;
        }
        kvf_gpu_item_done(gpu, &request->items[event->index], event->status, event->tier);
        return true;
    default: /* REQUEST */
        if (request->n_done != request->n || request->n_encoding != 0) {
            return false;
        }
        request->n_bursts = 0;
        gpu->agent->n_requests--;
        return true;
    }
}

/* Map the flags, and let our streams write them. */
static int flags_take(struct kvf_gpu *gpu, int fd)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    void *base = NULL;
    int status = kvf_segment_check(fd, KVF_GPUD_FLAG_BYTES, false, remote->text,
                                   sizeof(remote->text));

    if (status == KVF_OK) {
        status = kvf_segment_map(fd, KVF_GPUD_FLAG_BYTES, true, &base, remote->text,
                                 sizeof(remote->text));
    }
    if (status != KVF_OK) {
        return status;
    }
    remote->flags = base;
    remote->flag_values[0] = remote->flag_values[1] = 0;
    status = kvf_gpu_pin(gpu->device, base, KVF_GPUD_FLAG_BYTES, false);
    remote->are_flags_pinned = status == KVF_OK;
    if (status == KVF_OK) {
        status = kvf_gpu_device_result(
            gpu->device,
            gpu->device->driver.cuMemHostGetDevicePointer(&remote->flags_address, base, 0),
            "cuMemHostGetDevicePointer");
    }
    if (status != KVF_OK) {
        (void)snprintf(remote->text, sizeof(remote->text), "flags: %.200s", gpu->device->text);
    }
    return status;
}

/* All regions are to be shared: none is, so far. */
static void sharing_start(struct kvf_gpu *gpu)
{
    for (struct kvf_gpu_region *region = gpu->regions; region != NULL; region = region->next) {
        region->is_shared = false;
    }
    gpu->agent->state = LINK_SHARING;
    gpu->agent->deadline_ns = kvf_now_ns() + CALL_NS;
}

static void link_share(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status = kvf_gpu_remote_share_on(gpu);

    if (status == KVF_EMPTY) {
        if (kvf_now_ns() >= remote->deadline_ns) {
            link_lose(gpu, KVF_ERR_TIMEOUT, "the worker does not answer");
        }
        return;
    }
    if (status != KVF_OK) {
        link_lose(gpu, status, remote->text);
        return;
    }
    if (remote->was_up && remote->status != KVF_OK) {
        kvf_client_log(gpu->client, 2, "agent path is up again");
    }
    remote->state = LINK_UP;
    remote->pause_ns = 0;
    remote->status = KVF_OK;
    remote->was_up = true;
}

static void on_welcome(struct kvf_gpu *gpu, const struct kvf_gpud_welcome *welcome, int fd)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status = welcome->status;

    memcpy(remote->text, welcome->text, sizeof(remote->text));
    if (status == KVF_OK) {
        status = flags_take(gpu, fd);
    }
    if (status == KVF_OK) {
        kvf_gpud_head_init(&remote->message.head, KVF_GPUD_MAPPED, sizeof(struct kvf_gpud_plain));
        remote->message.plain.request = 0;
        status = send_later(gpu);
    }
    if (status != KVF_OK) {
        link_lose(gpu, status, remote->text);
        return;
    }
    gpu->options.burst_bytes = welcome->burst_bytes;
    sharing_start(gpu);
}

/* Takes the descriptor. */
static void on_message(struct kvf_gpu *gpu, const union kvf_gpud_message *message, int fd)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    bool is_ok = true;

    switch (message->head.type) {
    case KVF_GPUD_WELCOME:
        if (remote->state == LINK_GREETING) {
            on_welcome(gpu, &message->welcome, fd);
        }
        break;
    case KVF_GPUD_GONE:
        remote->is_gone = true;
        break;
    case KVF_GPUD_ANSWER:
        if (remote->n_awaited > 0 && message->answer.type == remote->awaited.type &&
            message->head.number == remote->awaited.number) {
            remote->n_awaited--;
            if (remote->answer_status == KVF_OK) {
                remote->answer_status = message->answer.status;
                memcpy(remote->text, message->answer.text, sizeof(remote->text));
            }
        }
        break;
    default: /* EVENTS */
        for (uint32_t i = 0; i < message->head.number && is_ok; i++) {
            is_ok = on_event(gpu, &message->events.events[i]);
        }
        if (!is_ok) {
            link_lose(gpu, KVF_ERR_PROTOCOL, "the worker told of what was never asked");
        }
        break;
    }
}

static void receive(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    union kvf_gpud_message *message = malloc(sizeof(*message));
    struct kvf_seqpacket_message received;
    const char *why = "";
    int status = message != NULL ? KVF_OK : KVF_EMPTY;

    while (status == KVF_OK && remote->fd >= 0) {
        status = kvf_seqpacket_recv(remote->fd, message->bytes, sizeof(message->bytes), &received);
        if (status != KVF_OK) {
            break;
        }
        if (kvf_gpud_check(KVF_GPUD_TO_ENGINE, message, received.bytes, received.n_fds, &why) ==
            KVF_OK) {
            on_message(gpu, message, received.n_fds != 0 ? received.fds[0] : -1);
        } else {
            link_lose(gpu, KVF_ERR_PROTOCOL, why);
        }
        kvf_seqpacket_message_close(&received);
    }
    if (status != KVF_OK && status != KVF_EMPTY) {
        link_lose(gpu, KVF_ERR_DISCONNECTED, "the worker hung up");
    }
    free(message);
}

/* Sleep until the channel has something. */
static void channel_wait(const struct kvf_gpu_remote *remote, int timeout_ms)
{
    struct pollfd one = {.fd = remote->fd, .events = POLLIN};

    if (remote->unsent != NULL) {
        one.events |= POLLOUT;
    }
    (void)poll(&one, 1, timeout_ms);
}

bool kvf_gpu_remote_ask(struct kvf_gpu *gpu, int fd)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    const struct kvf_gpud_head *head = &remote->message.head;

    flush(gpu);
    if (remote->unsent != NULL || kvf_seqpacket_send(remote->fd, remote->message.bytes, head->bytes,
                                                     &fd, fd >= 0) != KVF_OK) {
        return false; /* a hang-up is seen when messages are taken */
    }
    if (remote->n_awaited++ == 0) {
        remote->answer_status = KVF_OK;
    }
    remote->awaited = *head;
    remote->deadline_ns = kvf_now_ns() + CALL_NS;
    return true;
}

bool kvf_gpu_remote_listen(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    uint32_t n_awaited = remote->n_awaited;
    bool is_late = kvf_now_ns() >= remote->deadline_ns;

    flush(gpu);
    receive(gpu);
    if (remote->state == LINK_UP && remote->n_awaited == n_awaited) {
        if (is_late) {
            link_lose(gpu, KVF_ERR_TIMEOUT, "the worker does not answer");
        } else {
            channel_wait(remote, LOOK_MS);
        }
    }
    return remote->state == LINK_UP;
}

int kvf_gpu_remote_call(struct kvf_gpu *gpu, int fd)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    bool is_sent = false;

    remote->deadline_ns = kvf_now_ns() + CALL_NS;
    do {
        is_sent = is_sent || kvf_gpu_remote_ask(gpu, fd);
    } while (kvf_gpu_remote_listen(gpu) && (!is_sent || remote->n_awaited > 0));
    return remote->state == LINK_UP ? remote->answer_status : KVF_ERR_DISCONNECTED;
}

int kvf_gpu_remote_call_plain(struct kvf_gpu *gpu, enum kvf_gpud_type type, uint32_t number)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    kvf_gpud_head_init(&remote->message.head, type, sizeof(struct kvf_gpud_plain));
    remote->message.head.number = number;
    remote->message.plain.request = 0;
    return kvf_gpu_remote_call(gpu, -1);
}

/* ----------------------------------------------------------------------------------------------
 * Requests
 */

/* Let a stream of ours write the request's flag, behind what the caller names. */
static int signal_queue(struct kvf_gpu *gpu, bool is_put, void *wait_event, void *stream,
                        uint64_t *value_out)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    const struct kvf_gpu_driver *driver = &gpu->device->driver;
    uint32_t flag = is_put ? 0 : 1;
    void *own = is_put ? gpu->put_stream : gpu->get_stream;
    bool is_removed = is_put ? KVF_MUTANT(agent_writer_wait) : KVF_MUTANT(agent_reader_wait);
    int status = KVF_OK;

    *value_out = 0;
    if (wait_event == NULL && stream == NULL) {
        return KVF_OK;
    }
    if (wait_event != NULL && !is_removed) {
        status = kvf_gpu_wait(gpu, own, wait_event);
    }
    if (status == KVF_OK && stream != NULL) {
        status = kvf_gpu_record(gpu, remote->event, stream);
        if (status == KVF_OK) {
            status = kvf_gpu_wait(gpu, own, remote->event);
        }
    }
    if (status == KVF_OK) {
        *value_out = ++remote->flag_values[flag];
        status = kvf_gpu_device_result(
            gpu->device,
            driver->cuStreamWriteValue64(own, remote->flags_address + flag * KVF_GPUD_FLAG_STRIDE,
                                         *value_out, 0),
            "cuStreamWriteValue64");
    }
    return status;
}

/* One item behind those in the message. */
static void item_append(struct kvf_gpud_items *items, const struct kvf_gpu_item *item,
                        const struct kvf_key *key, bool is_put)
{
    struct kvf_gpud_item *to = (void *)((uint8_t *)items + items->head.bytes);

    *to = (struct kvf_gpud_item){
        .key_bytes = (uint8_t)key->bytes,
        .supersedes_bytes = item->supersedes_bytes,
        .n_pages = (uint16_t)item->n_pages,
        .token = is_put ? item->token_start : item->token_first,
        .n_tokens = item->n_tokens,
    };
    memcpy(to->key, key->data, key->bytes);
    memcpy(to->supersedes, item->supersedes, item->supersedes_bytes);
    memcpy(to->pages, item->pages, item->n_pages * sizeof(to->pages[0]));
    items->head.bytes += (uint32_t)kvf_gpud_item_bytes(item->n_pages);
    items->n_items++;
}

/* All items of a request, in as many messages as it takes. keys: of a get. */
static int items_send(struct kvf_gpu *gpu, const struct kvf_gpu_request *request,
                      const struct kvf_gpu_get_item *gets)
{
    struct kvf_gpud_items *items = &gpu->agent->message.items;
    int status = KVF_OK;

    for (uint32_t i = 0; i < request->n && status == KVF_OK;) {
        *items = (struct kvf_gpud_items){.request = request->id};
        kvf_gpud_head_init(&items->head, KVF_GPUD_ITEMS, sizeof(*items));
        do {
            const struct kvf_gpu_item *item = &request->items[i];
            struct kvf_key key = gets != NULL ? gets[i].key
                                              : (struct kvf_key){item->key, item->key_bytes};

            item_append(items, item, &key, gets == NULL);
            i++;
        } while (i < request->n &&
                 items->head.bytes + kvf_gpud_item_bytes(request->items[i].n_pages) <=
                     KVF_GPUD_MESSAGE_BYTES_MAX);
        status = send_later(gpu);
    }
    return status;
}

static int request_send(struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                        const struct kvf_gpu_get_item *gets, uint32_t budget_ms, void *wait_event,
                        void *stream)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    const struct kvf_put_options *options = &request->options;
    struct kvf_gpud_request *message = &remote->message.request;
    struct kvf_gpud_request built = {.request = request->id, .flag = request->is_put ? 0 : 1};
    int status;

    if (!request->region->is_shared || remote->unsent != NULL ||
        remote->n_requests == KVF_GPUD_REQUESTS_MAX) {
        return KVF_ERR_BUSY;
    }
    status = signal_queue(gpu, request->is_put, wait_event, stream, &built.flag_value);
    if (status != KVF_OK) {
        (void)kvf_gpu_break(gpu, status);
        return KVF_ERR_IO;
    }
    kvf_gpud_head_init(&built.head, request->is_put ? KVF_GPUD_PUT : KVF_GPUD_GET, sizeof(built));
    built.head.number = request->region->number;
    built.n_items = request->n;
    built.budget_ms = budget_ms;
    for (uint32_t i = 0; i < request->n; i++) {
        built.n_pages += request->items[i].n_pages;
    }
    if (request->is_put) {
        built.flags = options->flags;
        built.depth = options->depth;
        built.ttl_s = options->ttl_s;
        built.priority = options->priority;
        built.budget_ms = options->budget_ms;
        if (options->parent.data != NULL) {
            built.parent_bytes = (uint8_t)options->parent.bytes;
            memcpy(built.parent, request->parent, options->parent.bytes);
        }
        request->n_encoding = 1;
    }
    request->n_bursts = 1; /* until its last event */
    remote->n_requests++;
    *message = built;
    status = send_later(gpu);
    if (status == KVF_OK) {
        (void)items_send(gpu, request, gets); /* without memory the link is lost, which ends it */
    }
    return KVF_OK;
}

int kvf_gpu_remote_put(struct kvf_gpu *gpu, struct kvf_gpu_request *request, void *wait_event,
                       void *stream, uint32_t *taken_out)
{
    int status = request_send(gpu, request, NULL, 0, wait_event, stream);

    if (status == KVF_OK && taken_out != NULL) {
        *taken_out = request->n;
    }
    return status;
}

int kvf_gpu_remote_get(struct kvf_gpu *gpu, struct kvf_gpu_request *request,
                       const struct kvf_gpu_get_item *items, uint32_t budget_ms, void *wait_event,
                       void *stream)
{
    return request_send(gpu, request, items, budget_ms, wait_event, stream);
}

void kvf_gpu_remote_cancel(struct kvf_gpu *gpu, const struct kvf_gpu_request *request)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    if (remote->state == LINK_UP) {
        kvf_gpud_head_init(&remote->message.head, KVF_GPUD_CANCEL, sizeof(struct kvf_gpud_plain));
        remote->message.plain.request = request->id;
        (void)send_later(gpu);
    }
}

/* ----------------------------------------------------------------------------------------------
 * The link
 */
static void link_ask(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    int status = kvf_session_say_gpu(gpu->client, KVF_GPU_PATH_AGENT, gpu->device->uuid);

    if (status == KVF_OK) {
        remote->state = LINK_ASKED;
        remote->deadline_ns = kvf_now_ns() + CALL_NS;
        return;
    }
    remote->status = status;
    remote->next_ns = kvf_now_ns() + PAUSE_NS_MIN;
    if (status == KVF_ERR_UNSUPPORTED) {
        (void)snprintf(remote->text, sizeof(remote->text),
                       "the daemon knows no GPU workers: update it, or use path ENGINE");
    }
}

static void link_greet(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    struct kvf_client_channel *channel = &gpu->client->channel;
    struct kvf_gpud_hello hello = {
        .hello = gpu->client->hello,
        .ring_bytes = gpu->options.ring_bytes,
        .burst_bytes = gpu->options.burst_bytes,
        .load_window_bytes = gpu->options.load_window_bytes,
        .load_group_bytes = gpu->options.load_group_bytes,
        .pinning = gpu->options.pinning,
    };

    if (!channel->is_answered) {
        if (!kvf_session_is_live(gpu->client) || kvf_now_ns() >= remote->deadline_ns) {
            link_lose(gpu, KVF_ERR_DISCONNECTED, "the daemon does not answer");
        }
        return;
    }
    channel->is_answered = false;
    if (channel->status != KVF_OK) {
        memcpy(remote->text, channel->text, sizeof(remote->text));
        link_lose(gpu, channel->status, channel->text);
        return;
    }
    remote->fd = channel->fd;
    remote->pid_fd = channel->pid_fd;
    channel->fd = channel->pid_fd = -1;
    kvf_gpud_head_init(&hello.head, KVF_GPUD_HELLO, sizeof(hello));
    (void)snprintf(hello.uuid, sizeof(hello.uuid), "%s", gpu->device->uuid);
    memcpy(remote->message.bytes, &hello, sizeof(hello));
    remote->state = LINK_GREETING;
    remote->deadline_ns = kvf_now_ns() + GREET_NS;
    (void)send_later(gpu);
}

void kvf_gpu_remote_advance(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;

    if (gpu->plan.profile_fp != gpu->client->plan.profile_fp) {
        gpu->plan = gpu->client->plan;
    }
    if (remote->state == LINK_DOWN && kvf_now_ns() >= remote->next_ns && !gpu->is_broken) {
        link_ask(gpu);
    }
    if (remote->state == LINK_ASKED) {
        link_greet(gpu);
    }
    if (remote->state >= LINK_GREETING) {
        flush(gpu);
        receive(gpu);
    }
    if (remote->state == LINK_GREETING && kvf_now_ns() >= remote->deadline_ns) {
        link_lose(gpu, KVF_ERR_TIMEOUT, "the worker does not answer");
    }
    if (remote->state == LINK_SHARING) {
        link_share(gpu);
    }
    if (remote->state == LINK_UP) {
        /* flags are written by streams of a device that can fail */
        int result = gpu->device->driver.cuStreamQuery(gpu->put_stream);

        if (result == KVF_CUDA_SUCCESS) {
            result = gpu->device->driver.cuStreamQuery(gpu->get_stream);
        }
        if (kvf_gpu_device_result(gpu->device, result, "flags") < KVF_OK) {
            (void)kvf_gpu_break(gpu, KVF_ERR_IO);
            link_lose(gpu, KVF_ERR_IO, gpu->device->text);
        }
    }
    if (remote->state == LINK_ENDING) {
        link_end(gpu);
    }
}

bool kvf_gpu_remote_is_up(const struct kvf_gpu *gpu)
{
    return gpu->agent->state == LINK_UP;
}

void kvf_gpu_remote_sleep(struct kvf_gpu *gpu, uint64_t deadline_ns)
{
    const struct kvf_gpu_remote *remote = gpu->agent;
    uint64_t now_ns = kvf_now_ns();
    uint64_t ms = deadline_ns > now_ns ? (deadline_ns - now_ns + KVF_NS_PER_MS - 1) / KVF_NS_PER_MS
                                       : 0;
    uint64_t most = remote->state == LINK_UP ? SLEEP_MS : LOOK_MS;

    for (uint32_t flag = 0; flag < 2 && remote->flags != NULL; flag++) {
        const uint64_t *word = (const void *)(remote->flags + flag * KVF_GPUD_FLAG_STRIDE);

        most = __atomic_load_n(word, __ATOMIC_RELAXED) != remote->flag_values[flag] ? LOOK_MS
                                                                                    : most;
    }
    channel_wait(remote, (int)(ms < most ? ms : most));
}

/* ----------------------------------------------------------------------------------------------
 * Birth and death
 */
int kvf_gpu_remote_open(struct kvf_gpu *gpu, char *text, size_t text_bytes)
{
    uint64_t deadline_ns = kvf_now_ns() + gpu->client->connect_timeout_ms * KVF_NS_PER_MS;
    struct kvf_gpu_remote *remote = calloc(1, sizeof(*remote));
    int status;

    if (remote == NULL) {
        return KVF_ERR_NO_MEMORY;
    }
    gpu->agent = remote;
    remote->fd = remote->pid_fd = -1;
    remote->unsent_tail = &remote->unsent;
    remote->memories = calloc(KVF_GPUD_MEMORIES_MAX, sizeof(*remote->memories));
    status = remote->memories == NULL ? KVF_ERR_NO_MEMORY
                                      : kvf_gpu_event_create(gpu->device, &remote->event);
    gpu->plan = gpu->client->plan;
    gpu->is_awake = true;
    while (status == KVF_OK && remote->state != LINK_UP) {
        kvf_client_enter(gpu->client);
        kvf_session_tend(gpu->client, true);
        kvf_requests_drain(gpu->client, true);
        kvf_client_leave(gpu->client);
        kvf_gpu_remote_advance(gpu);
        if (remote->state == LINK_DOWN && remote->status != KVF_OK &&
            remote->status != KVF_ERR_BUSY) {
            status = remote->status;
        } else if (kvf_now_ns() >= deadline_ns) {
            status = remote->status != KVF_OK ? remote->status : KVF_ERR_TIMEOUT;
        } else if (remote->state != LINK_UP) {
            channel_wait(remote, LOOK_MS);
        }
    }
    if (status != KVF_OK) {
        (void)snprintf(text, text_bytes, "path AGENT: %.200s",
                       remote->text[0] != 0 ? remote->text : kvf_status_text(status));
    }
    return status;
}

void kvf_gpu_remote_sleep_memory(struct kvf_gpu *gpu)
{
    for (struct kvf_gpu_region *region = gpu->regions; region != NULL; region = region->next) {
        (void)kvf_gpu_remote_unregister(gpu, region);
    }
    if (gpu->agent->state == LINK_UP) {
        (void)kvf_gpu_remote_call_plain(gpu, KVF_GPUD_SLEEP, 0);
    }
    gpu->is_awake = false;
}

int kvf_gpu_remote_wake_memory(struct kvf_gpu *gpu)
{
    int status = KVF_OK;

    if (gpu->agent->state == LINK_UP) {
        status = kvf_gpu_remote_call_plain(gpu, KVF_GPUD_WAKE, 0);
    }
    if (status != KVF_OK && gpu->agent->state == LINK_UP) {
        return status;
    }
    gpu->is_awake = true;
    if (gpu->agent->state == LINK_UP) {
        sharing_start(gpu);
        kvf_gpu_remote_share_wait(gpu);
    }
    return KVF_OK;
}

void kvf_gpu_remote_share_wait(struct kvf_gpu *gpu)
{
    while (gpu->agent->state == LINK_SHARING) {
        kvf_gpu_remote_advance(gpu);
        if (gpu->agent->state == LINK_SHARING) {
            channel_wait(gpu->agent, LOOK_MS);
        }
    }
}

/* Nothing of ours is written or read by the worker any more when this returns. */
void kvf_gpu_remote_close(struct kvf_gpu *gpu)
{
    struct kvf_gpu_remote *remote = gpu->agent;
    uint64_t deadline_ns = kvf_now_ns() + CALL_NS;

    for (struct kvf_gpu_request *request = gpu->requests; request != NULL;
         request = request->next) {
        kvf_gpu_remote_cancel(gpu, request);
    }
    while (remote->n_requests > 0 && kvf_now_ns() < deadline_ns) {
        kvf_gpu_remote_advance(gpu);
        channel_wait(remote, LOOK_MS);
    }
    for (struct kvf_gpu_region *region = gpu->regions; region != NULL; region = region->next) {
        (void)kvf_gpu_remote_unregister(gpu, region);
    }
    (void)gpu->device->driver.cuStreamSynchronize(gpu->put_stream);
    (void)gpu->device->driver.cuStreamSynchronize(gpu->get_stream);
    (void)flags_drop(gpu);
    kvf_gpu_event_drop(gpu, remote->event);
    kvf_fd_close(&remote->fd);
    kvf_fd_close(&remote->pid_fd);
    unsent_drop(remote);
    free(remote->memories);
    free(remote);
    gpu->agent = NULL;
}

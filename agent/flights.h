/* SPDX-License-Identifier: Apache-2.0
 *
 * flights.h: flights that wait for their tier, in the order in which they came.
 */
#ifndef KVF_AGENT_FLIGHTS_H
#define KVF_AGENT_FLIGHTS_H

#include "agent/core.h"

static inline void kvf_flights_push(struct kvf_flight_queue *queue, struct kvf_flight *flight)
{
    flight->next = NULL;
    if (queue->tail != NULL) {
        queue->tail->next = flight;
    } else {
        queue->head = flight;
    }
    queue->tail = flight;
    queue->count++;
    queue->bytes += flight->record_bytes;
}

/* Put back what was popped and could not start. */
static inline void kvf_flights_unpop(struct kvf_flight_queue *queue, struct kvf_flight *flight)
{
    flight->next = queue->head;
    queue->head = flight;
    if (queue->tail == NULL) {
        queue->tail = flight;
    }
    queue->count++;
    queue->bytes += flight->record_bytes;
}

static inline struct kvf_flight *kvf_flights_pop(struct kvf_flight_queue *queue)
{
    struct kvf_flight *flight = queue->head;

    if (flight != NULL) {
        queue->head = flight->next;
        if (queue->head == NULL) {
            queue->tail = NULL;
        }
        queue->count--;
        queue->bytes -= flight->record_bytes;
        flight->next = NULL;
    }
    return flight;
}

#endif /* KVF_AGENT_FLIGHTS_H */

/* SPDX-License-Identifier: Apache-2.0
 *
 * status.h: the status values for everything below the public header.
 *
 * The values exist once, in kvferry.h: 0 is done, positive values are outcomes, negative ones are
 * failures. Functions of ours return int and never errno. The first function to know why something
 * failed logs it with the system's reason; the others only pass the status on.
 */
#ifndef KVF_BASE_STATUS_H
#define KVF_BASE_STATUS_H

#include "kvferry.h"

/* The status that says best what an errno value means for a drive or a memory object:
 * KVF_ERR_NO_SPACE, _NO_MEMORY, _BUSY, _UNSUPPORTED, _REFUSED, _INVALID, else KVF_ERR_IO. 0 gives
 * KVF_OK. Any thread. */
int kvf_status_from_errno(int error_number);

#endif /* KVF_BASE_STATUS_H */

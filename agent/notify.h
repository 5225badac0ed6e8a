/* SPDX-License-Identifier: Apache-2.0
 *
 * notify.h: tell the service manager (systemd, Type=notify) how the daemon is.
 */
#ifndef KVF_AGENT_NOTIFY_H
#define KVF_AGENT_NOTIFY_H

/* Remember $NOTIFY_SOCKET and open a socket for it. Without the variable nothing is sent. Once, at
 * start. */
void kvf_notify_init(void);

/* Send "READY=1" or the like. Any thread, signal handlers included; never blocks; what cannot be
 * sent is lost. Keeps errno. */
void kvf_notify(const char *state);

/* Say what the daemon is at, where that takes long: for `systemctl status`, and so that the service
 * manager waits 30 s more. At most once a second, the first call at once. One thread at a time. */
void kvf_notify_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif /* KVF_AGENT_NOTIFY_H */

/* SPDX-License-Identifier: Apache-2.0
 *
 * small_socket.c: to be preloaded into the daemon: what it accepts can hold only a few messages,
 * as a socket of the usual size does when an arena has hundreds of pieces.
 */
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) int accept4(int fd, struct sockaddr *restrict address,
                                                   socklen_t *restrict address_bytes, int flags)
{
    int accepted = (int)syscall(SYS_accept4, fd, address, address_bytes, flags);
    int bytes = 1; /* the kernel's least is a little more */

    if (accepted >= 0) {
        (void)setsockopt(accepted, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    }
    return accepted;
}

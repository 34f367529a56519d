// The network of an emulated cluster: a network namespace per node, each with a TUN device "eth0", joined by a switch.
//
// usage: switch NODES RATE_BITS LATENCY_NS LIFETIME_S PARENT_PID
//
// A packet passes the sender's port (RATE_BITS, first come, first served), the wire (LATENCY_NS), and the receiver's
// port (RATE_BITS again). Packets are never lost or reordered. A port forwards while it receives: two idle ports take one
// packet time. Departure times are computed, not measured: a delayed switch does not slow the network permanently.
//
// Only this process holds the namespaces. Once they are ready it prints "ready FD FD ...": other processes enter node i
// through /proc/PID/fd/FD_i. When the switch ends (SIGTERM, the parent's death, the lifetime) it kills all processes in
// the namespaces, and the kernel removes them.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_NODES = 250,
    NETWORK = 0x0a4d0000,    // 10.77.0.0/24; node i has 10.77.0.(i + 1)
    MTU = 1500,
    FRAMING = 38,            // Ethernet's bytes per packet on the wire: preamble, header, checksum, gap
    READ_AT_ONCE = 16,
    TX_QUEUE_PACKETS = 10000,
    PAUSES_PER_LATENCY = 20, // packets are handled in batches, as by a real adapter: this halves the CPU time
    MAX_PAUSE_NS = 50000,
};

typedef int64_t nanoseconds;

struct packet {
    struct packet *next;
    nanoseconds due;         // when it leaves its current queue
    nanoseconds port_time;   // its transmission time on a port
    size_t length;
    int receiver;
    char bytes[];            // struct virtio_net_hdr, then the IP packet (up to 64 KiB: the receiver segments it)
};

struct queue {
    struct packet *first, *last;
};

static struct node {
    int namespace_fd, tun;
    ino_t namespace_inode;
    nanoseconds sent, received;      // until when its two ports are busy
    struct queue wire, port;         // packets on the wire from it; packets at its receiving port
} nodes[MAX_NODES];
static int num_nodes;
static volatile sig_atomic_t stopped;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static int check(int result, const char *what) {
    if (result < 0) fail(what);
    return result;
}

static nanoseconds now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void push(struct queue *queue, struct packet *packet) {
    packet->next = NULL;
    if (queue->first) queue->last->next = packet;
    else queue->first = packet;
    queue->last = packet;
}

static struct packet *pop(struct queue *queue) {
    struct packet *packet = queue->first;
    queue->first = packet->next;
    return packet;
}

// ---- the namespaces

static void set_sysctl(const char *name, const char *value) {
    char path[128];
    snprintf(path, sizeof path, "/proc/sys/net/%s", name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return;  // the kernel lacks it (no IPv6)
    check(fd, path);
    check(write(fd, value, strlen(value)), path);
    close(fd);
}

static void bring_up(int sock, const char *name) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, name);
    check(ioctl(sock, SIOCGIFFLAGS, &request), "SIOCGIFFLAGS");
    request.ifr_flags |= IFF_UP;
    check(ioctl(sock, SIOCSIFFLAGS, &request), "SIOCSIFFLAGS");
}

static void set_address(int sock, unsigned long which, uint32_t address) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, "eth0");
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
    memcpy(&request.ifr_addr, &in, sizeof in);
    check(ioctl(sock, which, &request), "address of eth0");
}

static void make_node(int index) {
    struct node *node = &nodes[index];
    check(unshare(CLONE_NEWNET), "a network namespace (unshare)");
    node->namespace_fd = check(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "/proc/self/ns/net");
    struct stat status;
    check(fstat(node->namespace_fd, &status), "fstat");
    node->namespace_inode = status.st_ino;

    set_sysctl("ipv6/conf/all/disable_ipv6", "1");
    set_sysctl("ipv4/tcp_congestion_control", "reno");     // without losses its window grows to the limit
    set_sysctl("ipv4/tcp_slow_start_after_idle", "0");
    set_sysctl("ipv4/tcp_no_metrics_save", "1");

    node->tun = check(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "eth0");
    check(ioctl(node->tun, TUNSETIFF, &request), "TUNSETIFF");
    check(ioctl(node->tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "TUNSETOFFLOAD");

    int sock = check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");
    bring_up(sock, "lo");
    set_address(sock, SIOCSIFADDR, NETWORK + index + 1);
    set_address(sock, SIOCSIFNETMASK, 0xffffff00);
    request.ifr_mtu = MTU;
    check(ioctl(sock, SIOCSIFMTU, &request), "SIOCSIFMTU");
    request.ifr_qlen = TX_QUEUE_PACKETS;
    check(ioctl(sock, SIOCSIFTXQLEN, &request), "SIOCSIFTXQLEN");
    bring_up(sock, "eth0");
    close(sock);
}

// Kill all processes in the namespaces, repeatedly until there are none: a process may be forking.
static void empty_namespaces(void) {
    for (int tries = 0, found = 1; found && tries < 200; tries++) {
        found = 0;
        DIR *proc = opendir("/proc");
        if (!proc) return;
        for (struct dirent *entry; (entry = readdir(proc));) {
            int pid = atoi(entry->d_name);
            char path[64];
            struct stat status;
            snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
            if (pid <= 0 || pid == getpid() || stat(path, &status)) continue;
            for (int i = 0; i < num_nodes; i++)
                if (status.st_ino == nodes[i].namespace_inode) {
                    kill(pid, SIGKILL);
                    found = 1;
                }
        }
        closedir(proc);
        if (found) usleep(10000);
    }
}

// ---- the switch

// A packet's transmission time on a port; with segmentation offload it is several on the wire, each with headers.
static nanoseconds port_time(const struct virtio_net_hdr *offload, size_t length, double ns_per_byte) {
    size_t segments = 1, headers = offload->hdr_len;
    if (offload->gso_type != VIRTIO_NET_HDR_GSO_NONE && offload->gso_size && length > headers)
        segments = (length - headers + offload->gso_size - 1) / offload->gso_size;
    return (length + (segments - 1) * headers + segments * FRAMING) * ns_per_byte;
}

static void take_packets(struct node *sender, double ns_per_byte, nanoseconds latency) {
    static char buffer[sizeof(struct virtio_net_hdr) + 65536];
    const size_t before = sizeof(struct virtio_net_hdr);
    for (int i = 0; i < READ_AT_ONCE; i++) {
        ssize_t length = read(sender->tun, buffer, sizeof buffer);
        if (length < 0 && errno == EAGAIN) return;
        check(length, "reading from eth0");
        const unsigned char *ip = (unsigned char *)buffer + before;
        if (length < (ssize_t)before + 20 || ip[0] >> 4 != 4) continue;
        uint32_t address;
        memcpy(&address, ip + 16, 4);
        uint32_t receiver = ntohl(address) - NETWORK - 1;
        if (receiver >= (uint32_t)num_nodes) continue;  // broadcast, multicast, no such node

        struct packet *packet = malloc(sizeof *packet + length);
        if (!packet) fail("malloc");
        memcpy(packet->bytes, buffer, length);
        packet->length = length;
        packet->receiver = receiver;
        packet->port_time = port_time((struct virtio_net_hdr *)buffer, length - before, ns_per_byte);
        nanoseconds start = now();
        sender->sent = (sender->sent > start ? sender->sent : start) + packet->port_time;
        packet->due = sender->sent + latency;
        push(&sender->wire, packet);
    }
}

// The queue whose first packet is due first; NULL if all are empty.
static struct queue *earliest(void) {
    struct queue *found = NULL;
    for (int i = 0; i < num_nodes; i++) {
        struct queue *queues[] = {&nodes[i].wire, &nodes[i].port};
        for (int j = 0; j < 2; j++)
            if (queues[j]->first && (!found || queues[j]->first->due < found->first->due)) found = queues[j];
    }
    return found;
}

// Forward due packets in order of time. Returns when the next packet is due, or `end`.
static nanoseconds pass_on(nanoseconds end) {
    for (struct queue *queue; (queue = earliest());) {
        if (queue->first->due > now()) return queue->first->due < end ? queue->first->due : end;
        struct packet *packet = pop(queue);
        struct node *receiver = &nodes[packet->receiver];
        if (queue == &receiver->port) {
            check(write(receiver->tun, packet->bytes, packet->length), "writing to eth0");
            free(packet);
        } else {
            nanoseconds behind = receiver->received + packet->port_time;
            receiver->received = packet->due = packet->due > behind ? packet->due : behind;
            push(&receiver->port, packet);
        }
    }
    return end;
}

// Wait until a time, until SIGTERM, or until a port has packets (NULL: don't poll ports).
static void wait_until(nanoseconds time, struct pollfd *ports, const sigset_t *signals) {
    nanoseconds left = time - now();
    if (left <= 0 && !ports) return;
    if (left < 0) left = 0;
    struct timespec timeout = {left / 1000000000, left % 1000000000};
    if (ppoll(ports, ports != NULL, &timeout, signals) < 0 && errno != EINTR) fail("ppoll");
}

static void stop(int signal_number) {
    (void)signal_number;
    stopped = 1;
}

int main(int argc, char **argv) {
    if (argc != 6) return fprintf(stderr, "usage: switch NODES RATE_BITS LATENCY_NS LIFETIME_S PARENT_PID\n"), 2;
    num_nodes = atoi(argv[1]);
    if (num_nodes < 1 || num_nodes > MAX_NODES) return fprintf(stderr, "NODES: 1 to %d\n", MAX_NODES), 2;
    double ns_per_byte = 8e9 / atof(argv[2]);
    nanoseconds latency = atof(argv[3]), end = now() + (nanoseconds)(atof(argv[4]) * 1e9);

    sigset_t term, none;
    sigemptyset(&none);
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, NULL);  // delivered only while ppoll waits
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != atoi(argv[5])) return 1;

    int home = check(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "/proc/self/ns/net");
    for (int i = 0; i < num_nodes; i++) make_node(i);
    check(setns(home, CLONE_NEWNET), "setns");
    prctl(PR_SET_TIMERSLACK, 1UL);
    struct sched_param priority = {.sched_priority = 10};
    sched_setscheduler(0, SCHED_FIFO, &priority);  // if permitted

    printf("ready");
    for (int i = 0; i < num_nodes; i++) printf(" %d", nodes[i].namespace_fd);
    printf("\n");
    fflush(stdout);

    int ports = check(epoll_create1(EPOLL_CLOEXEC), "epoll");
    for (int i = 0; i < num_nodes; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &nodes[i]};
        check(epoll_ctl(ports, EPOLL_CTL_ADD, nodes[i].tun, &event), "epoll");
    }
    struct pollfd any = {.fd = ports, .events = POLLIN};
    nanoseconds pause = latency / PAUSES_PER_LATENCY < MAX_PAUSE_NS ? latency / PAUSES_PER_LATENCY : MAX_PAUSE_NS;
    while (!stopped && now() < end) {
        nanoseconds next = pass_on(end), rest = now() + pause;
        wait_until(next > rest ? next : rest, &any, &none);
        wait_until(rest, NULL, &none);
        struct epoll_event events[MAX_NODES];
        int ready = check(epoll_wait(ports, events, num_nodes, 0), "epoll");
        for (int i = 0; i < ready; i++) take_packets(events[i].data.ptr, ns_per_byte, latency);
    }
    empty_namespaces();
    return 0;
}

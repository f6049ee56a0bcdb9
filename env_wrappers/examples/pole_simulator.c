/* A pole on a cart as an external simulator in C: the protocol first, the simulator below it.

   gcc -O2 -o pole_simulator pole_simulator.c -lm

   The protocol is described in docs/external-simulators.md. Numbers are little endian, as on
   every machine that hpcrl runs on. Exit codes: 0 told to leave, 1 anything else, said on stderr. */

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { VERSION = 1, TOKEN_BYTES = 64 };
enum { HELLO = 1, WELCOME = 2, RESET = 3, STEP = 4, STATE = 5, CLOSE = 6, ERROR = 255 };

static int connection;

static void fail(const char *what)
{
    fprintf(stderr, "pole_simulator: %s\n", what);
    exit(1);
}

static void write_all(const void *data, size_t count)
{
    const char *at = data;
    while (count > 0) {
        ssize_t done = send(connection, at, count, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) fail("hpcrl is gone");
        at += done;
        count -= (size_t)done;
    }
}

static void read_all(void *data, size_t count)
{
    char *at = data;
    while (count > 0) {
        ssize_t done = recv(connection, at, count, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) fail("hpcrl is gone");
        at += done;
        count -= (size_t)done;
    }
}

static void send_message(uint32_t kind, const void *body, uint32_t length)
{
    uint32_t header[2] = {kind, length};
    write_all(header, sizeof header);
    write_all(body, length);
}

/* Wait for a message; its body goes to `body`, which has room for `room` bytes. */
static uint32_t receive_message(void *body, uint32_t room)
{
    static char text[1024];
    uint32_t header[2];
    read_all(header, sizeof header);
    if (header[0] == ERROR) {
        if (header[1] >= sizeof text) header[1] = sizeof text - 1;
        read_all(text, header[1]);
        fail(text);
    }
    if (header[1] > room) fail("hpcrl sent a longer message than expected");
    read_all(body, header[1]);
    return header[0];
}

static void say_hello(const char *spaces)
{
    const char *path = getenv("HPCRL_SIMULATOR_SOCKET");
    const char *token_file = getenv("HPCRL_SIMULATOR_TOKEN_FILE");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct { char magic[8]; uint32_t version; char token[TOKEN_BYTES]; } hello = {"", VERSION, ""};
    char body[sizeof hello + 1024];
    char welcome[16];
    size_t length;
    FILE *file;

    if (!path || !token_file) fail("HPCRL_SIMULATOR_SOCKET and HPCRL_SIMULATOR_TOKEN_FILE: not set");
    if (strlen(path) >= sizeof address.sun_path) fail("the path of the socket is too long");
    strcpy(address.sun_path, path);
    file = fopen(token_file, "r");
    if (!file) fail("can't read the token file");
    length = fread(hello.token, 1, TOKEN_BYTES, file);
    fclose(file);
    while (length > 0 && hello.token[length - 1] == '\n') hello.token[--length] = '\0';
    memcpy(hello.magic, "HPCRLSIM", 8);

    connection = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) < 0)
        fail("nobody listens at the socket");
    memcpy(body, &hello, sizeof hello);
    length = strlen(spaces);
    if (length > 1024) fail("the spaces are too long");
    memcpy(body + sizeof hello, spaces, length);
    send_message(HELLO, body, (uint32_t)(sizeof hello + length));
    if (receive_message(welcome, sizeof welcome) != WELCOME) fail("no welcome came");
}

static void send_state(const float *observation, uint32_t count, float reward, int terminated,
                       int truncated)
{
    char body[8 + 64 * sizeof(float)];
    memcpy(body, &reward, 4);
    body[4] = (char)terminated;
    body[5] = (char)truncated;
    body[6] = body[7] = 0;
    memcpy(body + 8, observation, count * sizeof(float));
    send_message(STATE, body, 8 + count * (uint32_t)sizeof(float));
}

/* ---- The simulator: Barto, Sutton and Anderson (1983), as in Gymnasium's CartPole. ---- */

static const char *SPACES =
    "{\"observation\": {\"shape\": [4], \"dtype\": \"float32\", \"low\": -1e6, \"high\": 1e6},"
    " \"action\": {\"discrete\": 2}}";

static double state[4];
static uint64_t random_state = 1;
static int steps;

static double uniform(double low, double high) /* SplitMix64 */
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return low + (high - low) * (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

static void show(float reward, int terminated, int truncated)
{
    float seen[4];
    for (int i = 0; i < 4; i++) seen[i] = (float)state[i];
    send_state(seen, 4, reward, terminated, truncated);
}

static void reset(uint64_t seed)
{
    if (seed) random_state = seed;
    for (int i = 0; i < 4; i++) state[i] = uniform(-0.05, 0.05);
    steps = 0;
    show(0.0f, 0, 0);
}

static void step(int32_t action)
{
    double sine = sin(state[2]), cosine = cos(state[2]);
    double push = ((action ? 10.0 : -10.0) + 0.05 * state[3] * state[3] * sine) / 1.1;
    double turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1));
    double move = push - 0.05 * turn * cosine / 1.1;
    state[0] += 0.02 * state[1];
    state[1] += 0.02 * move;
    state[2] += 0.02 * state[3];
    state[3] += 0.02 * turn;
    steps++;
    show(1.0f, fabs(state[0]) > 2.4 || fabs(state[2]) > 12 * 3.14159265358979 / 180, steps == 500);
}

int main(void)
{
    union { uint64_t seed; int32_t action; char bytes[64]; } body;
    say_hello(SPACES);
    for (;;) {
        switch (receive_message(&body, sizeof body)) {
        case RESET: reset(body.seed); break;
        case STEP: step(body.action); break;
        case CLOSE: return 0;
        default: fail("hpcrl sent a message of an unknown type");
        }
    }
}

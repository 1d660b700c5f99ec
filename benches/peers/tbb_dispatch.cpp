// The dispatch benchmark on oneTBB's flow graph: prints "case ns" lines. Built by `forebay bench dispatch`.
// Each case passes one 64-bit number; every node adds 1 to it, as the Forebay side does.
#include <tbb/flow_graph.h>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>
using namespace tbb::flow;
using Clock = std::chrono::steady_clock;
static double ns(Clock::time_point a) { return std::chrono::duration<double, std::nano>(Clock::now() - a).count(); }
typedef function_node<uint64_t, uint64_t> Node;
static volatile uint64_t sink_;

static void chain(int n, int rounds) {
    graph g;
    std::vector<std::unique_ptr<Node>> t;
    for (int i = 0; i < n; i++) t.emplace_back(new Node(g, serial, [](uint64_t v) { return v + 1; }));
    for (int i = 0; i + 1 < n; i++) make_edge(*t[i], *t[i + 1]);
    for (int r = 0; r < rounds / 10 + 1; r++) { t[0]->try_put(r); g.wait_for_all(); }
    auto a = Clock::now();
    for (int r = 0; r < rounds; r++) { t[0]->try_put(r); g.wait_for_all(); }
    printf("chain %.3f\n", ns(a) / ((double)n * rounds));
}
static void fan_out(int n, int rounds) {
    graph g;
    broadcast_node<uint64_t> b(g);
    std::vector<std::unique_ptr<Node>> t;
    for (int i = 0; i < n; i++) { t.emplace_back(new Node(g, serial, [](uint64_t v) { return v + 1; })); make_edge(b, *t.back()); }
    for (int r = 0; r < rounds / 10 + 1; r++) { b.try_put(r); g.wait_for_all(); }
    auto a = Clock::now();
    for (int r = 0; r < rounds; r++) b.try_put(r);
    g.wait_for_all();
    printf("fan-out %.3f\n", ns(a) / ((double)n * rounds));
}
static void stream(int messages) {
    double best = 0;
    for (int warm = 0; warm < 2; warm++) {
        graph g;
        uint64_t next = 0, last = warm ? messages : messages / 10;
        input_node<uint64_t> source(g, [&](tbb::flow_control &fc) -> uint64_t { if (next >= last) { fc.stop(); return 0; } return next++; });
        // At most 4 messages per channel of three stages are under way.
        limiter_node<uint64_t> limit(g, 12);
        Node s1(g, serial, [](uint64_t v) { return v + 1; }), s2(g, serial, [](uint64_t v) { return v + 1; });
        function_node<uint64_t, continue_msg> s3(g, serial, [](uint64_t v) { sink_ = v + 1; return continue_msg(); });
        make_edge(source, limit); make_edge(limit, s1); make_edge(s1, s2); make_edge(s2, s3); make_edge(s3, limit.decrementer());
        auto a = Clock::now();
        source.activate(); g.wait_for_all();
        best = ns(a) / (double)last;
    }
    printf("stream-3 %.3f\n", best);
}
int main(int argc, char **argv) {
    int scale = argc > 1 ? atoi(argv[1]) : 1;
    chain(1000, 1000 * scale); fan_out(64, 15000 * scale); stream(200000 * scale);
    return 0;
}

#include "forebay.h"

#include <cstdio>

int main() {
  std::puts(forebay_version());
  return forebay_graph_check(nullptr) == FOREBAY_INVALID ? 0 : 1;
}

// Traffic of a ladder of three plans whose rates of first-token flips are known.
#pragma once

#include <vector>

#include "tests/simulation/gate_traffic.h"

namespace carryover {

// Until a plan serves that flips at more than 2 %.
Run LadderServesBad(std::vector<double> rates, int most);

// Until the cell is closed, though a plan may be good.
Run LadderCloses(std::vector<double> rates, int most);

// Until this plan serves, from nothing.
Run LadderFinds(std::vector<double> rates, int plan, int most);

// The first plan flips rarely for 5,000 requests, the others never, so that they are proved from
// one request in ten; then the first at 20 %: until the second serves, without a request that is
// served natively in between.
int LadderClimbs(Random* random);

// The first plan flips at 20 % until it has failed, then no more: until it serves again. Each time
// that it fails it may try again at once.
int LadderComesDown(Random* random);

}  // namespace carryover

//! Bad input of every kind against real processes: a clear error in the right shape, no work on the nodes, and a cluster
//! that is as good as new afterwards. Every test ends with [`Scene::close`](integration_tests::scene::Scene::close).

mod bodies;
mod fields;
mod leaving;
mod lengths;
mod overload;
mod protocol;
mod slow;
mod support;

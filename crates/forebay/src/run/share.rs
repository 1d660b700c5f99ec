//! Which ports of a graph have one pool of datablocks together.
//!
//! Rules:
//! 1. Ports share a pool whose blocks are never on an accelerator: outputs of tasks that only the processor runs, to others such and to
//!    the program, and feeds of such tasks. What is known of a port's blocks for the sake of devices (who reads them, who is
//!    ahead of whom) is known of one port, then.
//! 2. They have the same template, and blocks that are large enough ([`LEAST_SHARED`]).
//! 3. Nobody has one of another graph: a graph that has ended gives everything back.

use std::collections::HashMap;

use forebay_policy::DeviceSet;

use super::node::{Chan, EndRef, Node, PoolRef};
use super::runtime::RuntimeInner;
use crate::block::{LEAST_SHARED, Pool};
use crate::template::Template;

pub(super) fn share_pools(nodes: &mut [Node], channels: &mut [Chan], rt: &RuntimeInner) {
    let host = DeviceSet::default().with(0);
    let of_host: Vec<bool> = nodes.iter().map(|n| n.devices == host && n.spare.is_empty()).collect();
    let is_for_host = |c: &Chan| match c.to {
        EndRef::Node(n) => of_host[n as usize],
        EndRef::Host => true,
    };
    let mut shared: HashMap<Template, PoolRef> = HashMap::new();
    let mut share = |pool: &mut PoolRef| {
        let template = pool.template();
        if template.bytes() >= LEAST_SHARED {
            let new = || PoolRef(Pool::shared(template, rt.pinned.clone(), rt.pool.workers()));
            *pool = shared.entry(template).or_insert_with(new).clone();
        }
    };
    for (n, _) in nodes.iter_mut().zip(&of_host).filter(|(_, of_host)| **of_host) {
        let to_host = |c: &u32| is_for_host(&channels[*c as usize]);
        n.outputs.iter_mut().filter(|o| o.channels.iter().all(to_host)).for_each(|o| share(&mut o.pool));
    }
    for c in channels {
        let for_host = is_for_host(c);
        c.pool.iter_mut().filter(|_| for_host).for_each(&mut share);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;
    use std::sync::{Arc, Mutex};

    use forebay_hal::sim::{Model, SimDevice};
    use forebay_hal::{Kind, Source};

    use crate::{Arg, Graph, Launch, Runtime, Task, Template};

    fn template(bytes: usize) -> Template {
        Template::array::<u8>([bytes])
    }

    /// Item after item through a chain: how many blocks its tasks wrote.
    fn blocks_of_a_chain(bytes: usize) -> usize {
        let (t, written) = (template(bytes), Arc::new(Mutex::new(HashSet::new())));
        let mut g = Graph::new("chain");
        let ids: Vec<_> = (0..16)
            .map(|i| {
                let written = written.clone();
                let task = Task::new(format!("t{i}")).input("x", t).output("y", t).host(move |inv| {
                    let y = inv.output::<u8>("y")?;
                    written.lock().unwrap().insert(y.as_ptr().addr());
                    y[0] = inv.input::<u8>("x")?[0] + 1;
                    Ok(())
                });
                g.add(task).unwrap()
            })
            .collect();
        ids.windows(2).for_each(|w| g.connect((w[0], "y"), (w[1], "x")).unwrap());
        let (feed, drain) = (g.feed((ids[0], "x"), 4).unwrap(), g.drain((ids[15], "y"), 4).unwrap());
        let run = Runtime::builder().cpu_only().workers(1).build().unwrap().start(g).unwrap();
        for _ in 0..50 {
            let mut b = run.acquire(feed).unwrap();
            b.assign(&vec![1u8; bytes]).unwrap();
            run.push(feed, b).unwrap();
            assert_eq!(run.pull(drain).unwrap().as_slice::<u8>().unwrap()[0], 17);
        }
        written.lock().unwrap().len()
    }

    #[test]
    fn a_chain_lives_in_a_few_blocks() {
        let (few, apart) = (blocks_of_a_chain(super::LEAST_SHARED), blocks_of_a_chain(super::LEAST_SHARED - 1));
        assert!(few <= 5 && apart == 16, "{few}, and {apart} where each task has its own");
    }

    #[test]
    fn ports_share_a_pool_if_they_are_alike_and_all_is_the_processors() {
        let t = template(super::LEAST_SHARED);
        let host = |name: &str, t: Template| Task::new(name).input("x", t).output("y", t).host(|_| Ok(()));
        let mut g = Graph::new("some");
        let [a, b] = ["a", "b"].map(|n| g.add(host(n, t)).unwrap());
        let kernel = Source::Cpu(Arc::new(|_| ()));
        let sim = Launch::new(kernel, "none", [Arg::port("x"), Arg::port("y")]);
        let c = g.add(Task::new("c").input("x", t).output("y", t).kernels(Kind::Sim, [sim])).unwrap();
        let [d, other] = [("d", t), ("other", template(5000))].map(|(n, t)| g.add(host(n, t)).unwrap());
        for (from, to) in [(a, b), (b, c), (c, d)] {
            g.connect((from, "y"), (to, "x")).unwrap();
        }
        for (first, last) in [(a, d), (other, other)] {
            g.feed((first, "x"), 1).unwrap();
            g.drain((last, "y"), 1).unwrap();
        }
        let device = Arc::new(SimDevice::new(Model::default()));
        let run = Runtime::builder().devices(vec![device]).build().unwrap().start(g).unwrap();
        let pools: Vec<usize> = run.core.nodes.iter().map(|n| n.outputs[0].pool.0.as_ptr().addr()).collect();
        let same = |i: usize, j: usize| pools[i] == pools[j];
        assert!(same(0, 3), "a's goes to b, d's to the program");
        for apart in [1, 2, 4] {
            assert!((0..5).all(|i| i == apart || !same(i, apart)), "{apart}: {pools:x?}");
        }
        let of_feeds: Vec<_> = run.core.channels.iter().flat_map(|c| &c.pool).map(|p| p.0.as_ptr().addr()).collect();
        assert_eq!(of_feeds, [pools[0], pools[4]]);
    }
}

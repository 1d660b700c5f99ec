//! Grids on a CUDA driver that finds no memory for some calls, or on a device that faults now and then: they start, or say why not,
//! and give everything back.

use super::given_out::bytes;
use super::*;

/// `STAND_IN_FAULTS` says how many commands do.
#[test]
fn grids_on_a_device_that_faults() {
    if !stand_in::alone("scarce::grids_on_a_device_that_faults") || std::env::var_os("STAND_IN_FAULTS").is_none() {
        return;
    }
    let mut device = device().unwrap();
    let life = |device: &Arc<dyn Device>, i: usize| -> Result<(), Error> {
        let b = builder().ring(16).blocks(2);
        let mut g = (if i.is_multiple_of(2) { b.heap(4 << 20) } else { b }).start_on(device)?;
        for i in 0..40u64 {
            assert_eq!(g.wait(g.submit(call(&g, "add", &[i, 1]))?)?.result_as::<u64>(), i + 1);
        }
        if i.is_multiple_of(2) {
            _ = g.heap();
        }
        match i % 4 {
            0 => g.drain(),
            1 => g.reload(&builder()),
            2 => g.stop(),
            _ => Ok(()),
        }
    };
    let (mut well, mut lost) = (0, 0);
    for i in 0.. {
        let came = life(&device, i);
        assert_eq!(device.allocated(), 0);
        match came {
            Ok(()) => well += 1,
            Err(e) => assert!(e.to_string().contains("lost"), "{e}"),
        }
        if device.alloc(1).is_err() {
            lost += 1;
            // SAFETY: nobody else in this process uses the device.
            device = unsafe { device.renew() }.unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(bytes(), 0, "after {well} and {lost}");
        }
        if well >= 20 && lost >= 20 {
            break;
        }
    }
}

#[test]
fn grids_on_a_device_that_faults_with_the_stand_in() {
    for pinned in [false, true] {
        let variables = [("STAND_IN_FAULTS", "40"), (PINNED, "1")];
        stand_in::again_with("scarce::grids_on_a_device_that_faults", &variables[..1 + usize::from(pinned)]);
    }
}

/// `STAND_IN_SCARCE` says how many.
#[test]
fn grids_where_memory_is_scarce() {
    if !stand_in::alone("scarce::grids_where_memory_is_scarce") || std::env::var_os("STAND_IN_SCARCE").is_none() {
        return;
    }
    let device = device().unwrap();
    let of_memory = |why: &str| assert!(why.contains("no memory is left") || why.contains("out of memory"), "{why}");
    let (mut begun, mut refused) = (0, 0);
    while begun < 20 || refused < 20 {
        let b = builder().ring(16).blocks(2);
        match (if begun % 2 == 0 { b.heap(4 << 20) } else { b }).start_on(&device) {
            Ok(mut g) => {
                begun += 1;
                let tickets: Vec<_> = (0..40u64).map(|i| g.submit(call(&g, "add", &[i, 1])).unwrap()).collect();
                for (i, ticket) in (0..).zip(tickets) {
                    assert_eq!(g.wait(ticket).unwrap().result_as::<u64>(), i + 1u64);
                }
                _ = g.heap();
                match begun % 3 {
                    0 => g.drain().unwrap(),
                    1 => g.stop().unwrap(),
                    _ => {}
                }
                if begun % 5 == 0
                    && let Err(why) = g.reload(&builder())
                    && !matches!(why, Error::Stopped)
                {
                    of_memory(&why.to_string());
                }
            }
            Err(why) => {
                refused += 1;
                of_memory(&why.to_string());
            }
        }
        let since = std::time::Instant::now();
        while device.allocated() + bytes() > 0 {
            let left = (device.allocated(), bytes());
            assert!(since.elapsed() < Duration::from_secs(20), "{left:?} B are left after {begun} and {refused}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// With `STAND_IN_SCARCE=25` it stood still in three of four runs on one machine (seeds 32, 33, 32; not 31): the thread that has the
/// grid waited in the driver while the grid ran. On another one it never did, in some 250 runs with 80 seeds, by themselves and six
/// beside each other. Why was not found yet; until it is this is run by hand (`-- --ignored`), so as to keep nothing else from
/// ending. The stand-in says which call waits for what, once it has for 20 seconds.
#[test]
#[ignore = "stands still now and then, and why is not known yet"]
fn grids_where_memory_is_scarce_with_the_stand_in() {
    for pinned in [false, true] {
        let variables = [("STAND_IN_SCARCE", "40"), (PINNED, "1")];
        stand_in::again_with("scarce::grids_where_memory_is_scarce", &variables[..1 + usize::from(pinned)]);
    }
}

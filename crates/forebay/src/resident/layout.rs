//! What host and device share, written once: the structs here, and the C header that [`header`] makes of them, with the
//! sizes and offsets that Rust found asserted in it.

use std::fmt::Write as _;

/// Stop words.
pub const RUN: u32 = 0;
/// Finish what was submitted, then end.
pub const STOP_DRAIN: u32 = 1;
/// End after the present task.
pub const STOP_NOW: u32 = 2;

/// Of a slot's function: the task has one item.
pub const SINGLE: u32 = 1 << 31;

/// Of a slot's `root`: so many bits are the root, those above are [`round`].
pub const ROOT_BITS: u32 = 21;

/// Of a task's priority: its root has a limit of fuel. The lowest bit is the ring.
pub const LIMITED: u32 = 2;

/// Bits of a status; none is success.
pub const UNKNOWN_FUNCTION: u32 = 1;
/// The root used up its fuel.
pub const OUT_OF_FUEL: u32 = 2;
/// One of its tasks freed what was not to be freed.
pub const BAD_FREE: u32 = 4;
/// One of the tasks that were submitted together found no room.
pub const NO_ROOM: u32 = 8;
/// Bits from here on are the program's own ([`super::Error::Failed`]).
pub const FIRST_OWN: u32 = 1 << 8;

/// Bytes of arguments.
pub const ARGS: usize = 32;
/// Halves of words that a task has.
pub const POST_WORDS: usize = 16;
/// Blocks that have posts: the first ones.
pub const POSTS: usize = 256;
/// Bytes of a result.
pub const RESULT: usize = 40;

/// Which time a slot of a ring of `size` is filled with this ticket, as far as there are bits for it: never what it was the
/// time before, nor 0 the first time.
pub fn round(ticket: u32, size: usize) -> u32 {
    (ticket >> size.trailing_zeros()).wrapping_add(1) << ROOT_BITS
}

/// A type with a C name.
trait InC {
    fn declare(name: &str) -> String;
}

macro_rules! scalar {
    ($($t:ty => $c:literal),*) => {$(
        impl InC for $t {
            fn declare(name: &str) -> String {
                format!("{} {name}", $c)
            }
        }
    )*};
}
scalar!(u8 => "unsigned char", u32 => "u32", u64 => "u64");

impl<T: InC, const N: usize> InC for [T; N] {
    fn declare(name: &str) -> String {
        T::declare(&format!("{name}[{N}]"))
    }
}

impl<T: InC> InC for *mut T {
    fn declare(name: &str) -> String {
        T::declare(&format!("*{name}"))
    }
}

macro_rules! shared {
    ($($(#[$doc:meta])* struct $name:ident align($align:literal) { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C, align($align))]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }

            // SAFETY: nothing but integers and pointers, for which zeros are valid.
            unsafe impl bytemuck::Zeroable for $name {}

            impl InC for $name {
                fn declare(name: &str) -> String {
                    format!("struct {} {name}", stringify!($name))
                }
            }
        )*

        fn structs() -> String {
            let mut out = String::new();
            $(
                let _ = writeln!(out, "struct alignas({}) {} {{", $align, stringify!($name));
                $(let _ = writeln!(out, "  {};", <$ty as InC>::declare(stringify!($field)));)*
                let _ = writeln!(out, "}};\nstatic_assert(sizeof({}) == {}, \"size\");", stringify!($name), size_of::<$name>());
                $(
                    let _ = writeln!(
                        out,
                        "static_assert(FB_OFFSET({0}, {1}) == {2}, \"offset\");",
                        stringify!($name),
                        stringify!($field),
                        std::mem::offset_of!($name, $field)
                    );
                )*
            )*
            out
        }
    };
}

shared! {
    /// A task that the host submits; written by the host, read by one block. Each half has something in it that tells it from
    /// what was there a round before, written behind the rest of that half.
    struct Slot align(64) {
        /// First item of a range.
        first: u64,
        /// Tasks and units that it and its descendants may use; 0 for no limit.
        fuel: u32,
        /// Its root: one that is free; and the [`round`].
        root: u32,
        /// Arguments, as the function wants them.
        args: [u8; ARGS],
        /// Items; one for a task that is no range.
        count: u64,
        /// Number of the function, and [`SINGLE`]; written and read together with what follows.
        function: u32,
        /// Ticket + 1, written last: the slot is filled.
        seq: u32,
    }
    /// A piece of a completion, written at once.
    struct Quad align(16) {
        /// Three of its words.
        words: [u32; 3],
        /// Ticket + 1: they are there.
        seq: u32,
    }
    /// What the host gets back: the result's ten words, the status, and one of nothing. Written by whoever ends the last task
    /// of a root, read by the host; with all pieces there the root may be used again.
    struct Done align(64) {
        /// The pieces.
        quads: [Quad; 4],
    }
    /// A task on the device.
    struct Task align(8) {
        /// Number of the function.
        function: u32,
        /// To whose completion it belongs.
        root: u32,
        /// First item.
        first: u64,
        /// Items.
        count: u64,
        /// 0 before 1.
        priority: u32,
        /// Where it is counted (docs/resident.md, rule 8): 0 by its block, 1 in its root's `remaining`, 2 nowhere, since it is
        /// all that there is of its root.
        counted: u32,
        /// Arguments.
        args: [u8; ARGS],
    }
    /// What is known of a submitted task on the device.
    struct Root align(64) {
        /// Its tasks that are not done, those included that wait for others.
        remaining: u32,
        /// Status bits.
        status: u32,
        /// Fuel that is left.
        fuel: u32,
        /// Ticket + 1.
        seq: u32,
        /// The result.
        result: [u32; RESULT / 4],
    }
    /// A place in a queue.
    struct Cell align(8) {
        /// Whose turn it is (queue.h, rule 2).
        seq: u32,
        /// Nothing.
        unused: u32,
        /// What is in it.
        task: Task,
    }
    /// A word with a line of its own.
    struct Queue align(128) {
        /// What may be taken.
        count: u32,
        /// Nothing.
        pad0: [u32; 31],
        /// What may be put.
        space: u32,
        /// Nothing.
        pad1: [u32; 31],
        /// Next ticket to take.
        head: u32,
        /// Nothing.
        pad2: [u32; 31],
        /// Next ticket to put.
        tail: u32,
        /// Cells; a power of two.
        size: u32,
        /// The cells.
        cells: *mut Cell,
    }
    /// A task for a block that waits, where only that block looks.
    struct Post align(128) {
        /// Each half a word of it, below 1; 0 when there is none.
        words: [u64; POST_WORDS],
    }
    /// A task that waits for others.
    struct Node align(8) {
        /// How many.
        pending: u32,
        /// Nothing.
        unused: u32,
        /// The task.
        task: Task,
    }
    /// From the host to the device.
    struct Ring align(8) {
        /// The slots.
        slots: *mut Slot,
        /// How many; a power of two.
        size: u32,
        /// Nothing.
        unused: u32,
    }
    /// How far the blocks are with a ring.
    struct Head align(128) {
        /// Next ticket that no block has taken.
        next: u32,
        /// The block that alone may take it, and 1; 0: any may. Read and written together with the former.
        keeper: u32,
    }
    /// How a block is; written by it, read by the host.
    struct Beat align(64) {
        /// Grows while it lives.
        epoch: u32,
        /// 1 while it runs a task.
        busy: u32,
        /// That task's function.
        function: u32,
        /// Its root's number.
        root: u32,
    }
    /// What the host wants; written by the host.
    struct Control align(64) {
        /// A stop word.
        stop: u32,
        /// Nothing; read with it.
        unused: u32,
    }
    /// What blocks change.
    struct State align(128) {
        /// Of the urgent ring and the ordinary one.
        heads: [Head; 2],
        /// Tasks for everybody: urgent and ordinary.
        queues: [Queue; 2],
        /// Numbers of nodes that are free.
        free_nodes: Queue,
        /// Blocks that look for work.
        idle: u32,
        /// How many more of them may look at the host's words, if that is limited; read with the former.
        permits: u32,
        /// The stop word for those who may not, as others have seen it.
        stop: u32,
        /// Nothing; read with it.
        unused: u32,
        /// Nothing.
        pad: [u32; 28],
        /// A bit for each block that waits and whose post is nobody's (post.h).
        waiting: [u64; POSTS / 64],
    }
    /// Everything: what never changes, of which each block has a copy at hand, and where the rest is.
    struct Grid align(8) {
        /// What blocks change.
        state: *mut State,
        /// Urgent and ordinary.
        rings: [Ring; 2],
        /// Blocks there are.
        blocks: u32,
        /// Whether only some may look at the host's words.
        limited: u32,
        /// Items of a range that a block does at a time.
        grain: u64,
        /// The nodes.
        nodes: *mut Node,
        /// As many roots as both rings have slots.
        roots: *mut Root,
        /// The same.
        done: *mut Done,
        /// One for each block.
        beats: *mut Beat,
        /// The host's word.
        control: *mut Control,
        /// Tasks that the host has submitted together; written by it.
        calls: *mut Task,
        /// Tasks that blocks have put aside: so many places for each.
        aside: *mut Task,
        /// How many.
        aside_size: u32,
        /// Whether both halves of a slot appear each at once.
        halves: u32,
        /// The heap (device/heap/heap.h), or null.
        heap: *mut u8,
        /// A post for each of the first [`POSTS`] blocks.
        posts: *mut Post,
    }
}

/// The header that the device's code begins with.
pub fn header() -> String {
    let mut out = String::from(
        "// Made from crates/forebay/src/resident/layout.rs; `cargo test` says when it is out of date.\n#pragma once\n\
         #if defined(__CUDACC_RTC__)\n#define FB_OFFSET(T, f) __INTADDR__(&((T *)0)->f)\n\
         #else\n#define FB_OFFSET(T, f) __builtin_offsetof(T, f)\n#endif\n",
    );
    let numbers = [
        ("FB_STOP_DRAIN", STOP_DRAIN),
        ("FB_STOP_NOW", STOP_NOW),
        ("FB_UNKNOWN_FUNCTION", UNKNOWN_FUNCTION),
        ("FB_OUT_OF_FUEL", OUT_OF_FUEL),
        ("FB_ROOT_BITS", ROOT_BITS),
        ("FB_LIMITED", LIMITED),
        ("FB_SINGLE", SINGLE),
        ("FB_BAD_FREE", BAD_FREE),
        ("FB_NO_ROOM", NO_ROOM),
        ("FB_FIRST_OWN", FIRST_OWN),
        ("FB_POSTS", POSTS as u32),
        ("FB_POST_WORDS", POST_WORDS as u32),
        ("FB_NONE", u32::MAX),
    ];
    for (name, value) in numbers {
        let _ = writeln!(out, "#define {name} {value}u");
    }
    out + &structs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_in_the_tree_is_the_one_that_rust_makes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../device/resident/layout.h");
        if std::env::var_os("FOREBAY_BLESS").is_some() {
            std::fs::write(path, header()).unwrap();
        }
        // As it was when this was built: the test runs where there is no checkout, too.
        assert!(
            include_str!("../../../../device/resident/layout.h") == header(),
            "device/resident/layout.h is out of date: FOREBAY_BLESS=1 cargo test -p forebay writes it"
        );
    }

    #[test]
    fn a_slot_is_a_line_whose_last_word_is_its_sequence_number() {
        assert_eq!((size_of::<Slot>(), std::mem::offset_of!(Slot, seq)), (64, 60));
        assert_eq!(std::mem::offset_of!(Slot, function) % 8, 0, "read together with its number");
        assert_eq!((size_of::<Done>(), size_of::<Quad>()), (64, 16));
    }

    #[test]
    fn each_half_of_a_slot_tells_the_present_round_from_the_one_before() {
        assert!(std::mem::offset_of!(Slot, root) < 32 && std::mem::offset_of!(Slot, seq) >= 32);
        let rounds = 1u32 << (32 - ROOT_BITS);
        for size in [2usize, 1024, 1 << 20] {
            assert_ne!(round(0, size), 0, "a slot that was never filled");
            for before in [0, 1, rounds - 2, rounds - 1, rounds, u32::MAX / size as u32] {
                let ticket = before.wrapping_mul(size as u32);
                assert_ne!(round(ticket, size), round(ticket.wrapping_add(size as u32), size), "{size}: {before}");
                assert_eq!(round(ticket, size) & ((1 << ROOT_BITS) - 1), 0, "the root's bits are free");
            }
        }
    }
}

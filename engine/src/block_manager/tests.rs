//! Blocks go out and come back.

use protocol::window::Groups;

use super::*;

fn manager(total: usize) -> BlockManager {
    BlockManager::new(total, 2, Kept::new(Groups::ONE, 2), false)
}

fn audit(manager: &BlockManager, tables: &[&BlockTable], elsewhere: usize) -> Vec<String> {
    let mut problems = Vec::new();
    manager.audit(tables.iter().copied(), elsewhere, &mut problems);
    problems
}

#[test]
fn blocks_go_out_once_and_come_back() {
    let mut manager = manager(4);
    let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
    manager.grow(&mut a, 2).unwrap();
    manager.grow(&mut b, 1).unwrap();
    manager.grow(&mut a, 1).unwrap();
    assert_eq!(a.blocks(), [BlockId(0), BlockId(1), BlockId(3)]);
    assert_eq!(b.blocks(), [BlockId(2)]);
    assert_eq!((manager.free(), manager.owned(), manager.total()), (0, 4, 4));
    assert_eq!(audit(&manager, &[&a, &b], 0), [""; 0]);
    manager.release(a);
    assert_eq!((manager.free(), manager.owned()), (3, 1));
    manager.release(b);
    assert_eq!((manager.free(), manager.owned()), (4, 0));
    assert_eq!(audit(&manager, &[], 0), [""; 0]);
}

#[test]
fn grows_all_or_nothing() {
    let mut manager = manager(2);
    let mut a = BlockTable::default();
    assert_eq!(
        manager.grow(&mut a, 3),
        Err(NoBlocks {
            needed: 3,
            available: 2
        })
    );
    assert!(a.is_empty());
    assert_eq!(manager.free(), 2);
}

#[test]
fn a_lost_table_is_found() {
    let mut manager = manager(3);
    let (mut lost, mut kept) = (BlockTable::default(), BlockTable::default());
    manager.grow(&mut lost, 2).unwrap();
    manager.grow(&mut kept, 1).unwrap();
    drop(lost);
    assert_eq!(
        audit(&manager, &[&kept], 0),
        ["2 block references are in no table, reservations explain 0"]
    );
    assert_eq!(audit(&manager, &[&kept], 2), [""; 0]);
}

#[test]
fn a_foreign_table_is_found() {
    let mut manager = manager(3);
    let mut a = BlockTable::default();
    manager.grow(&mut a, 1).unwrap();
    let copy = BlockTable {
        blocks: a.blocks.clone(),
        groups: a.groups.clone(),
        ..BlockTable::default()
    };
    assert_eq!(
        audit(&manager, &[&a, &copy], 0),
        ["block 0 is in 1 tables more than are counted"]
    );
}

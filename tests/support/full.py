"""Tests that repeat, on more cases or through more processes, what others of their kind show.

They run with ``--full`` (``tox run -e full``), or when one is named on the command line. Of a test with parameters
every run takes ``MOST`` instances, evenly spread, or as many as ``KEPT`` says; all of it where ``WHOLE`` names it.
``REPEATED`` names, for a single test, those of its file that show the same sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MOST = 12
WHOLE = (
    "kernels/test_plan.py::test_every_rejection_has_a_reason",
    "kernels/test_no_sync.py::test_no_call_waits",
    "kernels/test_ops.py::test_opcheck",
    "project/",
)
"""Beginnings of the names of tests of which every instance is cheap and shows something of its own."""
KEPT = {
    "benchmarks/test_bench_harness.py::TestTried::test_tried": 1,
    "diagnosis/test_diagnose.py::TestExplainAFile::test_first_or_tied": 3,
    "diagnosis/test_least_squares.py::TestNamed::test_while_the_known_scales_show": 1,
    "diagnosis/test_localise.py::TestAnotherGroup::test_named": 1,
    "diagnosis/test_localise.py::TestMovedRows::test_swapped_and_duplicated": 1,
    "diagnosis/test_localise.py::TestOneBlock::test_lost": 1,
    "diagnosis/test_localise.py::TestOneBlock::test_scales": 1,
    "diagnosis/test_mutate.py::TestScore::test_every_fault_is_killed_or_argued": 2,
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_a_block_lost_in_some_columns": 1,
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_a_store_that_truncates": 1,
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_a_fault_in_a_few_rows": 1,
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_right_is_not_accused": 1,
    "fixtures/test_vendor.py::TestCorners::test_faults_of_the_catalogue": 4,
    "fixtures/test_vendor.py::TestCorners::test_faults_of_others": 1,
    "harness/test_probing.py::TestBadKernels::test_named": 2,
    "harness/test_probing.py::TestSameAnswers::test_as_in_this_process": 1,
    "harness/test_reach.py::TestLeast::test_untested": 6,
    "harness/test_validation.py::TestBrokenKernels::test_threads_can_be_required": 1,
    "harness/test_validation.py::TestReach::test_quick_meets_it": 1,
    "harness/test_validation.py::TestRightKernels::test_conforms": 1,
    "kernels/test_differential.py::TestByName::test_validated_in_a_worker": 1,
    "kernels/test_ops.py::test_opcheck_compiled": 9,
    "numbers/test_fast_math.py::TestFaults::test_products": 1,
    "routines/mx/test_mx_more.py::TestFaults::test_all_are_killed": 2,
    "routines/mx/test_mx_contract.py::TestFaults::test_all_are_killed": 1,
    "numbers/test_quantize_bands.py::test_bands_change_nothing": 4,
    "numbers/test_quantize_bands.py::test_no_temporary_of_the_whole": 1,
    "numbers/test_rounding.py::TestByConstruction::test_pairs": 5,
    "project/test_ambient.py::TestDefaults::test_same_answers": 3,
    "project/test_ambient.py::TestTensors::test_same_answers": 2,
    "project/test_ambient.py::TestTensors::test_strides": 2,
    "routines/moe/test_contract.py::TestLayer::test_every_combine_is_judged_and_named": 2,
    "routines/moe/test_moe_tensor.py::TestFaults::test_is_named": 4,
    "routines/test_slow_oracle.py::TestInputsMatter::test_a_changed_input_is_noticed": 2,
    "tensorcore/test_fingerprint.py::test_every_schedule_is_read_back": 4,
    "truth/test_gemm.py::TestExact::test_against_rationals": 2,
    "truth/test_gemm_extremes.py::TestEdges::test_verbs_agree": 11,
    "truth/test_gemm_extremes.py::test_one_element_moved_is_noticed": 2,
    "verdict/test_undeclared.py::TestFloat32Kernels::test_pass_on_every_arch": 3,
}
REPEATED = {
    "project/test_wheel.py::TestStrangers::test_pip_resolves": "TestStrangers::test_pins_resolve",
    "benchmarks/test_bench_harness.py::TestCost::test_bare": "TestCost::test_watched",
    "benchmarks/test_bench_engines.py::TestPredictionBesideScalar::test_cpu_engine": "TestPrediction::test_cpu_engine",
    "cli/test_commands.py::TestCapturesAndLedger::test_all_captures": "TestCapturesAndLedger::test_known",
    "cli/test_hostile.py::TestStreams::test_closed_before_the_first_byte": "TestStreams::test_head",
    "cli/test_hostile.py::TestStreams::test_an_old_alphabet": "TestStreams::test_head",
    "diagnosis/test_diagnose.py::TestWhere::test_experts": "TestWhere::test_moved_rows",
    "diagnosis/test_diagnose.py::TestExplainAFile::test_by_place": "TestWhere::test_moved_rows",
    "diagnosis/test_least_squares.py::TestNamed::test_where_garbage_hides_them": "TestNamed::test_while_the_known",
    "diagnosis/test_localise.py::TestAnotherGroup::test_nobodys": "TestAnotherGroup::test_named",
    "diagnosis/test_localise.py::TestOneBlock::test_with_the_wrong_sign": "TestOneBlock::test_scales",
    "diagnosis/test_localise.py::test_half_a_row_is_no_duplicate": "TestMovedRows",
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_another_experts_weights": "TestAKernel",
    "diagnosis/test_strangers.py::TestAKernelThatIsNoSchedule::test_a_row_of_zeros_has_no_explanation": "TestAKernel",
    "fixtures/test_golden.py::TestStored::test_check": "TestStored",
    "fixtures/test_vendor.py::TestCatch2::test_from_the_export_to_the_verdict": "TestGoogleTest::test_from_the_export",
    "harness/test_ray.py::test_a_killed_node_costs_nothing": "test_without_ray_one_line_says_what_to_install",
    "harness/test_ray.py::test_what_dies_and_what_raises": "test_without_ray_one_line_says_what_to_install",
    "harness/test_validation.py::TestBrokenKernels::test_only_its_own_watch": "TestBrokenKernels::test_caught",
    "harness/test_validation.py::TestReach::test_a_soak_draws_everything": "TestReach::test_a_soak_draws_valid",
    "harness/test_validation.py::TestReach::test_a_soak_ends": "TestReach::test_a_soak_draws_valid",
    "harness/test_validation.py::TestRightKernels::test_processes_that_judge_find_the_same": "TestRightKernels",
    "harness/test_validation.py::TestRightKernels::test_the_quick_profile": "TestRightKernels::test_conforms",
    "kernels/test_moe_input.py::TestJudged::test_random": "TestJudged",
    "project/test_docs.py::TestPages::test_executed_pages": "TestPages::test_up_to_date",
    "project/test_pytest_plugin.py::TestAnotherProject::test_sabotaged": "TestAnotherProject::test_the_words",
    "project/test_pytest_plugin.py::TestReport::test_xdist": "TestReport",
    "project/test_house.py::TestDoctor::test_the_command_in_a_process_where_it_is_shadowed": "TestDoctor::test_another",
}


def left_out(items: Sequence[pytest.Item], named: Sequence[str]) -> set[pytest.Item]:
    """The items that a run without ``--full`` leaves out; ``named`` are the arguments of the command line.

    Raises pytest.UsageError: a file was collected whole, and a name here, or a test that stands for one, is not in it.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.config.getoption("keyword") and not any("::" in name for name in named):
            tests.setdefault(_name(item), []).append(item)
    files = {name.partition("::")[0] for name in tests}
    shown = [f"{name.partition('::')[0]}::{other}" for name, other in REPEATED.items()]
    for wanted in (*KEPT, *REPEATED, *shown):
        others = (test for test in tests if test not in REPEATED or test == wanted)
        if wanted.partition("::")[0] in files and not any(test.startswith(wanted) for test in others):
            raise pytest.UsageError(f"tests/support/full.py names {wanted}, and no such test was collected")
    out = {item for name in REPEATED for item in tests.get(name, [])}
    for name, instances in tests.items():
        if name.startswith(WHOLE) and name not in KEPT:
            continue
        kept = min(KEPT.get(name, MOST), len(instances))
        taken = {i * len(instances) // kept for i in range(kept)}
        out |= {item for i, item in enumerate(instances) if i not in taken}
    return out


def _name(item: pytest.Item) -> str:
    """``bounds/test_arches.py::TestAdversary::test_attained``, without parameters."""
    return item.nodeid.removeprefix("tests/").partition("[")[0]

"""Fixtures shared by all tests: real services, the real model, the real sandbox."""

pytest_plugins = [
    "tests.fixtures.services",
    "tests.fixtures.model",
    "tests.fixtures.tiny_base",
    "tests.fixtures.vllm",
    "tests.fixtures.real_data",
    "tests.fixtures.sandbox",
    "tests.fixtures.stack",
    "tests.fixtures.demo",
    "tests.fixtures.domains",
    "tests.fixtures.api",
]

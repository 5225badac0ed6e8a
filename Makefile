# SPDX-License-Identifier: Apache-2.0
#
# The short way in: `make demo` and `make test`. The build itself is CMake (see CMakePresets.json).
#
# On a fresh Debian 12 with git, make and a C compiler, every target first looks for the packages it
# needs; root gets them installed, others are told the one line to run.

# The one list of what kvferry needs: Debian package, and how to tell that it is there (a program,
# a pkg-config module, or a module of the system's Python). `make packages` prints the names.
NEEDS := \
    cmake:program=cmake \
    ninja-build:program=ninja \
    pkg-config:program=pkg-config \
    python3:program=python3 \
    python3-cffi:python=cffi \
    zstd:program=zstd \
    liburing-dev:module=liburing \
    libucx-dev:module=ucx \
    libyaml-dev:module=yaml-0.1 \
    libzstd-dev:module=libzstd \
    libsodium-dev:module=libsodium \
    libisal-dev:module=libisal \
    libjansson-dev:module=jansson \
    libcmocka-dev:module=cmocka \
    libmicrohttpd-dev:module=libmicrohttpd \
    libcurl4-openssl-dev:module=libcurl \
    libopenblas-dev:module=openblas \
    libhiredis-dev:module=hiredis \
    redis-tools:program=redis-cli

PACKAGES := $(foreach need,$(NEEDS),$(firstword $(subst :, ,$(need))))

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
# More options for CMake, as in `make test CMAKE_ARGS=-DKVF_CUDA=OFF`.
CMAKE_ARGS ?=

.DEFAULT_GOAL := build
.PHONY: demo test build asan tsan install deb wheel clean deps packages help

help:
	@echo "make demo      build, then store, find and fetch a cache with a real daemon"
	@echo "make test      build, then run all tests"
	@echo "make build     build into build/release"
	@echo "make asan      build with AddressSanitizer and UBSan, then run the tests"
	@echo "make tsan      build with ThreadSanitizer, then run the tests"
	@echo "make install   install below PREFIX ($(PREFIX)); DESTDIR is honoured"
	@echo "make deb       a Debian package into build/deb"
	@echo "make wheel     the Python package with its libraries into build/wheel"
	@echo "make deps      install what is missing (root), or say how"
	@echo "make clean     remove build/"

demo: build
	tests/integration/demo.sh build/release

test: build
	ctest --preset release

build: deps
	cmake --preset release $(CMAKE_ARGS)
	cmake --build --preset release -j $(JOBS)

asan tsan: deps
	cmake --preset $@ $(CMAKE_ARGS)
	cmake --build --preset $@ -j $(JOBS)
	ctest --preset $@

install: build
	cmake --install build/release --prefix $(PREFIX)

# What makes the package looks at programs and finds the packages of their libraries.
deb: NEEDS += file:program=file dpkg-dev:program=dpkg-shlibdeps
deb: deps
	cmake --preset release -B build/deb -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_INSTALL_SYSCONFDIR=/etc \
	    -DKVF_BUILD_TESTS=OFF $(CMAKE_ARGS)
	cmake --build build/deb -j $(JOBS)
	cd build/deb && cpack

wheel: build
	connectors/python/make_wheel.sh build/release build/wheel

clean:
	rm -rf build

packages:
	@echo $(PACKAGES)

deps:
	@missing=; \
	for need in $(NEEDS); do \
	    probe=$${need#*:}; \
	    case $$probe in \
	    program=*) command -v $${probe#*=} >/dev/null 2>&1 ;; \
	    module=*) pkg-config --exists $${probe#*=} 2>/dev/null ;; \
	    python=*) /usr/bin/python3 -c "import $${probe#*=}" 2>/dev/null ;; \
	    esac || missing="$$missing $${need%%:*}"; \
	done; \
	test -n "$$missing" || exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing:$$missing"; \
	    apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	    echo "Missing packages. On Debian or Ubuntu run:"; \
	    echo "  sudo apt-get install -y --no-install-recommends$$missing"; \
	    exit 2; \
	fi
